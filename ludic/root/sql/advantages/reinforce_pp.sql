-- reinforce_pp: reward minus the batch's mean, divided by the batch's standard deviation
-- paper: Hu 2025 (REINFORCE++), arXiv 2501.03262, section 3.1, without a KL term in the reward
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, and is compared with its peers in the batch (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with batch as (
    select peers, baseline_of(reward) as base
    from trajectories
    group by peers
)

select rollout_id, (episode_reward - base.lowest - base.total / base.n) / (base.std + $epsilon) as advantage
from trajectory_rows
left join batch using (peers)
