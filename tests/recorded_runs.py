"""A run of another trainer, as `ludic.record` leaves it: two lives, of which the second takes some steps again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import ludic
from ludic.models.tiny import make_tiny_model

TRAINER, SETTINGS = "trl 1.16.0", {"learning_rate": 1e-6, "beta": 0.0, "num_generations": 4, "use_vllm": False}
WORDS = "what is plus the answer cats play with a red ball"
NUM_STEPS, RESUMED_AT, KILLED_AFTER = 8, 4, 5
"""The first life ends after step KILLED_AFTER, and the second begins again with step RESUMED_AT."""
GROUPS, GROUP_SIZE = 2, 4
SAMPLES = GROUPS * GROUP_SIZE


def record_run(root: str, model: Path) -> str:
    """Record NUM_STEPS steps of GROUPS groups; rewards rise from step to step. model: folder to make the model in."""
    make_tiny_model(str(model), [WORDS])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for life, steps in enumerate((range(1, KILLED_AFTER + 1), range(RESUMED_AT, NUM_STEPS + 1))):
        sizes = {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS, "max_tokens": 8}
        with ludic.record(root, model=str(model), trainer=TRAINER, settings=SETTINGS, **sizes) as recorder:
            recorder.version = steps[0] - 1  # of the checkpoint that it goes on from
            for step in steps:
                groups = [_group(tokenizer, life, step, number) for number in range(GROUPS)]
                rewards = np.array([[row["episode_reward"] for row in group] for group in groups])
                recorder.append(groups)
                advantages = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
                numbers = {"loss": 0.5 / step, "learning_rate": 1e-6, "kl": 0.01 * step, "frac_reward_zero_std": 0.0}
                recorder.step(step, advantages=advantages, metrics=numbers)
    return root


def _group(tokenizer: Tokenizer, life: int, step: int, number: int) -> list[dict[str, Any]]:
    question = f"what is {step} plus {number}"
    answers = ["cats play", "the answer is 0", f"the answer is {step + number}", "a red ball"]
    rewards = [step / 10, 0.0, 1.0 + step / 10 + life / 100, 0.25]
    return [_row(tokenizer, question, *of_row, step) for of_row in zip(answers, rewards, strict=True)]


def _row(tokenizer: Tokenizer, question: str, answer: str, reward: float, step: int) -> dict[str, Any]:
    response = _ids(tokenizer, f"{answer} <eos>")
    # Every third step is of a sampler that keeps no logprobs.
    logprobs = {} if step % 3 == 0 else {"response_logprobs": np.full(len(response), -0.5, np.float32)}
    return {
        "prompt_tokens": _ids(tokenizer, f"<|user|> {question} <eos><|assistant|>"),
        "response_tokens": response,
        "episode_reward": reward,
        "reward_components": {"accuracy": reward - 0.01, "brevity": 0.01},
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        "metadata": {"source": "sums"},
        **logprobs,
        **({"capture": "trainer"} if logprobs else {}),
    }


def _ids(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids
