-- reinforce: reward minus the mean reward of all scored trajectories of all groups
-- paper: Williams 1992, REINFORCE with a constant baseline; in training, the batch's mean
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, and is compared with its peers in the batch (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
with batch as (
    select peers, baseline_of(reward) as base
    from trajectories
    group by peers
)

select rollout_id, episode_reward - base.lowest - base.total / base.n as advantage
from trajectory_rows
left join batch using (peers)
