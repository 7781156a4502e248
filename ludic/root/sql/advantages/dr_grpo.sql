-- dr_grpo: reward minus the group's mean, not divided by its standard deviation
-- paper: Liu et al. 2025 (Understanding R1-Zero-Like Training), arXiv 2503.20783, section 3.2
-- (n - 1) / n times rloo's advantage, since the mean includes the rollout's own reward
-- grain: one row per rollout_id | reads: trajectory_rows, rewards_of_peers
-- a trajectory counts once, and is compared with its peers in the group (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
select rollout_id, episode_reward - lowest - mean as advantage
from trajectory_rows
left join rewards_of_peers using (group_id, peers)
