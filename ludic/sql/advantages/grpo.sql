-- grpo: reward minus the group's mean, divided by the group's standard deviation
-- paper: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.2; the paper does not say which
-- standard deviation; this is the sample's (n - 1), as in TRL and verl
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, and is compared with its peers in the group (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation: 1e-6 as in verl; TRL adds 1e-4
-- default: epsilon = 1e-6
with
-- sorted, so that sums are bit-identical for any number of threads
groups as (
    select group_id, peers, list(reward order by reward) as rewards
    from trajectories
    where reward is not null
    group by group_id, peers
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
baselines as (
    select
        group_id,
        peers,
        len(rewards) as n,
        rewards[1] as lowest,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std,
        list_sum([reward - rewards[1] for reward in rewards]) as total
    from groups
)

select
    rollout_id,
    (episode_reward - lowest - total / n) / (coalesce(std, 0) + $epsilon) as advantage
from trajectory_rows
left join baselines using (group_id, peers)
