-- reinforce_pp: reward minus the batch's mean, divided by the batch's standard deviation
-- paper: Hu 2025 (REINFORCE++), arXiv 2501.03262, section 3.1, without a KL term in the reward
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, and is compared with its peers in the batch (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
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
    select
        peers,
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std
    from batch
)

select rollout_id, (episode_reward - lowest - mean) / (coalesce(std, 0) + $epsilon) as advantage
from trajectory_rows
left join baseline using (peers)
