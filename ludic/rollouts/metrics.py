"""Metrics of the rollouts of one call of a worker's engine, named as in schemas/metrics.v1.json. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from ludic.records import Rollout, RolloutBatch, RolloutGroup

_MOST_CHARACTERS = 500
"""Maximum characters of an error in a metrics row; rows are read often."""


def call_metrics(batch: RolloutBatch, *, wait_s: float, step_s: float) -> Iterator[dict[str, Any]]:
    """Yield one metrics row per environment, so that rewards of different scales are not mixed.

    wait_s, step_s: seconds that the worker waited before the call, and that sampling took.
    """
    names = sorted({rollout.env_name for group in batch.groups for rollout in group.rollouts})
    for env_name in names:
        groups = [group for group in batch.groups if group.rollouts[0].env_name == env_name]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        num_tokens = sum(rollout.action_length for rollout in rollouts)
        errors = [rollout.error for rollout in rollouts if rollout.error is not None]
        yield {
            "worker_id": batch.metadata.worker_id,
            "env_name": env_name,
            "policy_version": rollouts[0].policy_version,
            "num_rollouts": len(rollouts),
            "num_groups": len(groups),
            "num_tokens": num_tokens,
            "reward_mean": mean_reward(rollouts),
            "response_length_mean": sum(rollout.response_length for rollout in rollouts) / len(rollouts),
            "num_truncated": sum(rollout.truncated for rollout in rollouts),
            "num_incomplete_completions": sum(rollout.incomplete_completion for rollout in rollouts),
            "num_parse_errors": sum(rollout.parse_error for rollout in rollouts),
            "num_errors": len(errors),
            "num_zero_variance_groups": sum(map(_has_equal_rewards, groups)),
            "first_error": errors[0][:_MOST_CHARACTERS] if errors else None,
            "step_s": step_s,
            "wait_s": wait_s,
            "tokens_per_s": num_tokens / step_s,
        }


def mean_reward(rollouts: Sequence[Rollout]) -> float | None:
    """Return the mean reward of the scored rollouts; None if none is scored."""
    rewards = [rollout.episode_reward for rollout in rollouts if rollout.episode_reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _has_equal_rewards(group: RolloutGroup) -> bool:
    """Return whether all scored episodes of a group, at least two, have the same reward, so all advantages are 0."""
    rewards = {rollout.episode_id: rollout.episode_reward for rollout in group.rollouts}
    scored = [reward for reward in rewards.values() if reward is not None]
    return len(scored) > 1 and len(set(scored)) == 1
