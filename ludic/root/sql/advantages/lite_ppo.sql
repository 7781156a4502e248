-- lite_ppo: reward minus the group's mean, divided by the standard deviation of the whole batch
-- paper: Liu et al. 2025 (Part I: Tricks or Traps?), arXiv 2508.08221: the group's own deviation would blow up the
-- advantages of a group with nearly equal rewards
-- grain: one row per rollout_id | reads: trajectory_rows, rewards_of_peers
-- a trajectory counts once, and is compared with its peers (view trajectory_rows); alone in the batch it gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with sorted as (
    select peers, list_sort(flatten(list(rewards))) as rewards
    from rewards_of_peers
    group by peers
),

batch as (
    select peers, list_stddev_samp([reward - rewards[1] for reward in rewards]) as batch_std
    from sorted
)

select
    rollout_id,
    (episode_reward - lowest - mean) / (coalesce(batch_std, 0) + $epsilon) as advantage
from trajectory_rows
left join rewards_of_peers using (group_id, peers)
left join batch using (peers)
