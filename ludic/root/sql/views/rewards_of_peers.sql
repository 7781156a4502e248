-- rewards_of_peers: rewards of the peers in a group, with which a trajectory's reward is compared; its own is one of
-- them; a trajectory counts once
-- grain: one row per group_id and peers with a scored trajectory | reads: trajectories, which says what peers are
-- total, mean, std: of the rewards relative to the lowest, so that equal rewards give exactly 0, and large rewards lose no
-- digits; reward - lowest - mean is the reward minus the mean
-- std: of the sample (n - 1), and 0 for one reward; rewards: sorted
-- NULL: never
-- with the macro baseline_of for all but mean and rewards it would take DuckDB 0.3 ms longer, in each plan
-- sorted, so that sums are bit-identical for any number of threads
with groups as (
    select group_id, peers, list(reward order by reward) as rewards
    from trajectories
    where reward is not null
    group by group_id, peers
),

relative as (
    select group_id, peers, rewards, [reward - rewards[1] for reward in rewards] as above
    from groups
)

select
    group_id,
    peers,
    len(rewards) as n,
    rewards[1] as lowest,
    list_sum(above) as total,
    list_avg(above) as mean,
    coalesce(list_stddev_samp(above), 0) as std,
    rewards
from relative
