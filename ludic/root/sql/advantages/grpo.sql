-- grpo: reward minus the group's mean, divided by the group's standard deviation
-- paper: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.2; the paper does not say which
-- standard deviation; this is the sample's (n - 1), as in TRL and verl
-- grain: one row per rollout_id | reads: trajectory_rows, rewards_of_peers
-- a trajectory counts once, and is compared with its peers in the group (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation: 1e-6 as in verl; TRL adds 1e-4
-- default: epsilon = 1e-6
select rollout_id, (episode_reward - lowest - mean) / (std + $epsilon) as advantage
from trajectory_rows
left join rewards_of_peers using (group_id, peers)
