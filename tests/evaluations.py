"""Stored evaluations with any rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ludic.records.rollout import Rollout, RolloutBatch, RolloutGroup, RolloutMetadata, new_id
from ludic.root.root import Root
from ludic.root.rows.evaluations import SampleBlock
from ludic.root.rows.writer import RolloutWriter


def store_evaluation(
    root: Root,
    rewards: Mapping[str, Sequence[float | None]],
    *,
    version: int,
    evaluation: str = "0123456789abcdef",
    first_example: int = 0,
    **options: Any,
) -> None:
    """Store samples as `ludic eval` does, as one block; options are as in `rows`."""
    groups = tuple(
        RolloutGroup(key=example, rollouts=rows(example, number, of_example, version, options))
        for number, (example, of_example) in enumerate(rewards.items(), start=first_example)
    )
    examples = range(first_example, first_example + len(rewards))
    samples = range(max(map(len, rewards.values())))
    worker_id = SampleBlock(evaluation=evaluation, examples=examples, samples=samples).worker_id
    with RolloutWriter(root, worker_id, folder="evals") as writer:
        writer.append(RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=worker_id)))


def rows(
    example: str, number: int, rewards: Sequence[float | None], version: int, options: Mapping[str, Any]
) -> tuple[Rollout, ...]:
    """Return the samples of an example; options are fields of rows, or functions of (example, index)."""
    group_id = new_id()
    return tuple(
        row(
            **{
                "group_id": group_id,
                "group_index": index,
                "group_size": len(rewards),
                "request_index": number * 100_000 + index,
                "env_example_id": example,
                "policy_version": version,
                "policy_version_last": version,
                "episode_reward": reward,
                "terminated": reward is not None,
                "error": "broken" if reward is None else None,
            }
            | {name: value(example, index) if callable(value) else value for name, value in options.items()}
        )
        for index, reward in enumerate(rewards)
    )


def row(**options: Any) -> Rollout:
    reward, steps = options["episode_reward"], options.get("agent_steps", ())
    length = max([3, *(step.end for step in steps)])
    rewards = np.zeros(length, np.float32)
    rewards[-1] = reward or 0.0
    defaults = {
        "rollout_id": new_id(),
        "episode_id": new_id(),
        "env_name": "addition",
        "purpose": "eval",
        "model": "m",
        "temperature": 1.0,
        "max_tokens": 8,
        "seed": 0,
        "prompt_tokens": np.arange(5, dtype=np.int32),
        "response_tokens": np.arange(length, dtype=np.int32),
        "response_logprobs": np.zeros(length, np.float32),
        "token_rewards": rewards,
        "truncated": False,
        "finish_reason": "stop",
    }
    return Rollout.of(**(defaults | options))
