"""What a worker's metrics row says about the rollouts of a call."""

from dataclasses import replace
from typing import Any

from strategies import make_batch

from ludic.records.rollout import RolloutBatch
from ludic.rollouts.metrics import stream_metrics


def batch_of(rewards: list[list[float | None]], **changes: Any) -> RolloutBatch:
    """Groups with these rewards; `changes` hold for every rollout."""
    batch = make_batch(worker_id="w0-test", rewards=rewards)
    groups = (
        replace(group, rollouts=tuple(replace(rollout, **changes) for rollout in group.rollouts))
        for group in batch.groups
    )
    return replace(batch, groups=tuple(groups))


def row_of(batch: RolloutBatch) -> dict[str, Any]:
    (row,) = stream_metrics(batch, wait_s=1.0, step_s=2.0, policy_version=0)
    return row


def test_completions_that_hit_max_tokens_are_counted_apart_from_truncated_episodes() -> None:
    row = row_of(batch_of([[1.0, 0.0], [0.5, 0.5]], incomplete_completion=True, finish_reason="length"))
    assert (row["num_rollouts"], row["num_incomplete_completions"], row["num_truncated"]) == (4, 4, 0)


def test_groups_whose_scored_episodes_have_equal_rewards_are_counted() -> None:
    # Equal; unequal; equal but for one without a score; one score alone, which has no baseline; none at all.
    rewards = [[0.5, 0.5, 0.5], [0.5, 0.5, 1.0], [0.0, None, 0.0], [1.0, None, None], [None, None, None]]
    assert row_of(batch_of(rewards))["num_zero_variance_groups"] == 2


def test_an_episode_counts_once_per_agent() -> None:
    batch = batch_of([[1.0, 0.0], [0.5, 0.5]])
    # The first episode of each group has a second row; a critic's reward is 0.25 in all.
    groups = [
        replace(
            group,
            rollouts=(
                *group.rollouts,
                replace(group.rollouts[0], rollout_id=f"second-{group.key}", segment_index=1),
                *(
                    replace(row, rollout_id=f"critic-{row.rollout_id}", agent_id="critic", episode_reward=0.25)
                    for row in group.rollouts
                ),
            ),
        )
        for group in batch.groups
    ]
    row = row_of(replace(batch, groups=tuple(groups)))
    # Rewards 1, 0, 0.5, 0.5 of the agent, and four times 0.25. The agent's rewards differ in the first group only.
    assert (row["reward_mean"], row["num_zero_variance_groups"], row["num_rollouts"]) == (0.375, 1, 10)


def test_the_first_error_is_told() -> None:
    failed = batch_of([[None, None]], error="ValueError: reward is nan, wanted a finite float32")
    row = row_of(failed)
    assert (row["num_errors"], row["first_error"]) == (2, "ValueError: reward is nan, wanted a finite float32")
    assert row_of(batch_of([[1.0, 0.0]]))["first_error"] is None
