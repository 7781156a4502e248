"""Compute the metrics of the rollouts that a worker appends together, named as in schemas/metrics.v1.json. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from ludic.base import left_out
from ludic.records import GROUP_CLOSED, Rollout, RolloutBatch, RolloutGroup, comparable_reward

_MOST_CHARACTERS = 500
"""Maximum characters of an error in a metrics row, from both ends; rows are read often, and the end names file and
line."""


def stream_metrics(
    batch: RolloutBatch,
    *,
    wait_s: float,
    step_s: float,
    policy_version: int,
    num_running: int | None = None,
    waited_for: str | None = None,
    swap: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield one metrics row per environment, so that rewards of different scales are not mixed.

    wait_s, step_s: seconds since the previous rows without and with running episodes. policy_version, num_running,
    waited_for: see schemas/metrics.v1.json. swap: times of a new version's first rollouts, for the first row.
    """
    names = sorted({rollout.env_name for group in batch.groups for rollout in group.rollouts})
    for env_name in names:
        groups = [group for group in batch.groups if group.rollouts[0].env_name == env_name]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        num_tokens = sum(rollout.action_length for rollout in rollouts)
        errors = [rollout.error for rollout in rollouts if rollout.error not in (None, GROUP_CLOSED)]
        yield {
            "worker_id": batch.metadata.worker_id,
            "env_name": env_name,
            "policy_version": policy_version,
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
            "first_error": left_out(errors[0], _MOST_CHARACTERS) if errors else None,
            "step_s": step_s,
            "wait_s": wait_s,
            "tokens_per_s": num_tokens / step_s,
            "num_running": num_running,
            "waited_for": waited_for,
            **(swap or {} if env_name == names[0] else {}),
        }


def mean_reward(rollouts: Sequence[Rollout]) -> float | None:
    """Return the mean reward of the scored episodes, each counted once per agent; None if none is scored."""
    rewards = [reward for of_agent in _rewards(rollouts).values() for reward in of_agent]
    return fmean(rewards) if rewards else None


def _has_equal_rewards(group: RolloutGroup) -> bool:
    """Return whether each agent's scored episodes, at least two, have the same reward, so that all advantages are 0."""
    rewards = _rewards(group.rollouts)
    return bool(rewards) and all(
        len(of_agent) > 1 and len(set(map(comparable_reward, of_agent))) == 1 for of_agent in rewards.values()
    )


def _rewards(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return the rewards of the scored episodes by agent; an episode of several rows counts once."""
    scored = {(r.agent_id, r.episode_id): r.episode_reward for r in rollouts if r.episode_reward is not None}
    rewards: dict[str, list[float]] = {}
    for (agent_id, _), reward in scored.items():
        rewards.setdefault(agent_id, []).append(reward)
    return rewards
