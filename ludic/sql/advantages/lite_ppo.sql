-- lite_ppo: reward minus the group's mean, divided by the standard deviation of the whole batch
-- paper: Liu et al. 2025 (Part I: Tricks or Traps?), arXiv 2508.08221: the group's own deviation would blow up the
-- advantages of a group with nearly equal rewards
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories, rewards_of_peers
-- a trajectory counts once, and is compared with its peers (view trajectory_rows); alone in the batch it gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with batch as (
    select peers, baseline_of(reward).std as std_of_batch
    from trajectories
    group by peers
)

select rollout_id, (episode_reward - lowest - mean) / (std_of_batch + $epsilon) as advantage
from trajectory_rows
left join rewards_of_peers using (group_id, peers)
left join batch using (peers)
