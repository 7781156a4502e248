"""docs/record.md: its loop records what it trains on, with a model of one matrix in the place of nanochat's."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ludic

PAGE = (Path(__file__).parents[1] / "docs/record.md").read_text(encoding="utf-8")
WORDS = ["<bos>", "<end>", "count", "one", "two", "three"]
END, FORCED = 1, 5
NUM_STEPS, NUM_SAMPLES, NUM_EXAMPLES = 3, 4, 2


class Tokenizer:
    def render_for_completion(self, conversation: dict[str, Any]) -> list[int]:
        return [0, *(WORDS.index(word) for word in conversation["messages"][0]["content"].split())]

    def decode(self, ids: list[int]) -> str:
        return " ".join(WORDS[token] for token in ids)


class Bigrams:
    """A model that samples each token by the one before. As nanochat's, an engine that forces a token of a tool."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.logits = torch.nn.Parameter(torch.zeros(len(WORDS), len(WORDS)))

    def generate_batch(
        self, tokens: list[int], num_samples: int, *, max_tokens: int, temperature: float, top_k: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        sequences = [[*tokens, FORCED] for _ in range(num_samples)]
        masks = [[0] * (len(tokens) + 1) for _ in range(num_samples)]
        for sequence, mask in zip(sequences, masks, strict=True):
            while len(mask) - len(tokens) < max_tokens and sequence[-1] != END:
                kept = torch.topk(self.logits.detach()[sequence[-1]] / temperature, top_k)
                sequence.append(int(kept.indices[torch.multinomial(kept.values.softmax(0), 1)]))
                mask.append(1)
        return sequences, masks

    def loss_of(self, sequences: list[list[int]], masks: list[list[int]], advantages: torch.Tensor) -> torch.Tensor:
        logprobs = self.logits.log_softmax(1)
        terms = [
            advantage * logprobs[before, token]
            for sequence, mask, advantage in zip(sequences, masks, advantages, strict=True)
            for before, token, sampled in zip(sequence, sequence[1:], mask[1:], strict=False)
            if sampled
        ]
        return -torch.stack(terms).mean()


class CountsTwos:
    def reward(self, conversation: dict[str, Any], text: str) -> float:
        return float(text.count("two"))


@pytest.mark.slow
def test_the_loop_of_the_page_records_what_it_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (loop,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "ludic.record(" in code)
    model, question = Bigrams(), {"messages": [{"role": "user", "content": "count one"}, {"role": "assistant"}]}
    names = {
        "torch": torch,
        "engine": model,
        "loss_of": model.loss_of,
        "tokenizer": Tokenizer(),
        "task": CountsTwos(),
        "optimizer": torch.optim.SGD([model.logits], lr=1.0),
        "conversations_of": lambda step: [question] * NUM_EXAMPLES,
        "user_config": {"num_samples": NUM_SAMPLES},
        "num_steps": NUM_STEPS,
        "num_samples": NUM_SAMPLES,
        "top_k": 4,
        "lr": 1.0,
    }
    exec(loop, names)
    run = ludic.open("runs/mine")
    assert not run.verify().findings
    rows = run.sql("from batches join rollouts using (rollout_id, policy_version) order by step, batch_index")
    assert rows["step"].to_list() == np.repeat(range(1, NUM_STEPS + 1), NUM_EXAMPLES * NUM_SAMPLES).tolist()
    assert (rows["policy_version"] == rows["step"] - 1).all()
    rewards = rows["episode_reward"].to_numpy().reshape(-1, NUM_SAMPLES)
    wanted = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
    np.testing.assert_allclose(rows["advantage"].to_numpy(), wanted, atol=1e-6)
    assert [mask[0] for mask in rows["action_mask"]] == [False] * rows.height
    assert set(rows["capture"]) == {"ids"}
    assert run.sql("select max(learning_rate) as lr from metrics")["lr"][0] == 1.0
