"""Rollouts as real models make them, in size and in how well they compress.

Token ids follow Zipf's law over 150,000 ids, frequent ones first, as tokenizers number them, and are drawn
independently: real text repeats itself and compresses better. Logprobs are those of a confident model, most near 0.
"""

from datetime import UTC, datetime

import numpy as np

from ludic.records import (
    AgentStep,
    EnvironmentStep,
    Message,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    new_id,
)

VOCABULARY_SIZE = 150_000
_ZIPF = np.cumsum(1 / (np.arange(VOCABULARY_SIZE) + 2.7))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_batch(num_groups: int, *, mean_length: int = 1000, group_size: int = 8, seed: int = 0) -> RolloutBatch:
    """Groups of one environment and version; the same but for the ids for the same arguments."""
    rng = np.random.default_rng(seed)
    groups = tuple(_make_group(rng, number, group_size, mean_length) for number in range(num_groups))
    return RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id="w0-benchmark", timestamp=datetime.now(UTC)))


def _make_group(rng: np.random.Generator, number: int, group_size: int, mean_length: int) -> RolloutGroup:
    group_id, prompt = new_id(), _zipf_tokens(rng, 120)
    rollouts = tuple(
        _make_rollout(
            rng, prompt, group_id=group_id, group_index=index, group_size=group_size, number=number, mean=mean_length
        )
        for index in range(group_size)
    )
    return RolloutGroup(key=f"moar_cats/prompt-{number}", rollouts=rollouts)


def _make_rollout(
    rng: np.random.Generator,
    prompt: np.ndarray,
    *,
    group_id: str,
    group_index: int,
    group_size: int,
    number: int,
    mean: int,
) -> Rollout:
    length = int(rng.integers(mean // 2, mean * 3 // 2 + 1))
    tokens, reward = _zipf_tokens(rng, length), float(rng.random() < 0.4)
    text = " ".join(map(_word, tokens.tolist()))
    return Rollout(
        rollout_id=new_id(),
        group_id=group_id,
        episode_id=new_id(),
        group_index=group_index,
        group_size=group_size,
        request_index=number * group_size + group_index,
        env_name="moar_cats",
        env_example_id=f"prompt-{number}",
        policy_version=7,
        policy_version_last=7,
        model="Qwen/Qwen3-8B",
        temperature=1.0,
        max_tokens=4096,
        seed=int(rng.integers(2**62)),
        prompt_tokens=prompt,
        response_tokens=tokens,
        response_logprobs=-rng.gamma(0.25, 2.0, length).astype(np.float32),
        token_rewards=np.append(np.zeros(length - 1, np.float32), np.float32(reward)),
        episode_reward=reward,
        reward_components={"correct": reward},
        terminated=True,
        truncated=False,
        finish_reason="stop",
        agent_steps=(AgentStep(turn=0, action_target="env", start=0, end=length, finish_reason="stop", action=text),),
        environment_steps=(
            EnvironmentStep(
                turn=0,
                agent_steps=(0,),
                observation=None,
                action=text,
                next_observation=None,
                reward=reward,
                terminated=True,
                truncated=False,
            ),
        ),
        messages=(
            Message(role="user", content=" ".join(map(_word, prompt.tolist()))),
            Message(role="assistant", content=text),
        ),
    )


def _zipf_tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    """(length,) int32."""
    return np.searchsorted(_ZIPF, rng.random(length) * _ZIPF[-1]).astype(np.int32)


def _word(token: int) -> str:
    """A word that stands for a token: frequent ones are short, as in real text."""
    letters = ""
    while token >= 0:
        token, letter = divmod(token, len(_LETTERS))
        letters += _LETTERS[letter]
        token -= 1
    return letters
