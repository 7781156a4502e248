-- reinforce: reward minus the mean reward of all scored trajectories of all groups
-- paper: Williams 1992, REINFORCE with a constant baseline; in training, the batch's mean
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, and is compared with its peers in the batch (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
with
-- sorted, so that sums are bit-identical for any number of threads
batch as (
    select peers, list(reward order by reward) as rewards
    from trajectories
    where reward is not null
    group by peers
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baseline as (
    select peers, rewards[1] as lowest, list_avg([reward - rewards[1] for reward in rewards]) as mean
    from batch
)

select rollout_id, episode_reward - lowest - mean as advantage
from trajectory_rows
left join baseline using (peers)
