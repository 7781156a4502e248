-- dr_grpo: reward minus the group's mean, not divided by its standard deviation
-- paper: Liu et al. 2025 (Understanding R1-Zero-Like Training), arXiv 2503.20783, section 3.2
-- (n - 1) / n times rloo's advantage, since the mean includes the rollout's own reward
-- grain: one row per rollout_id | reads: trajectory_rows, trajectories
-- a trajectory counts once, and is compared with its peers in the group (view trajectory_rows); alone it gets 0
-- NULL: for a rollout that was not scored
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
        list_sum([reward - rewards[1] for reward in rewards]) as total
    from groups
)

select
    rollout_id,
    episode_reward - lowest - total / n as advantage
from trajectory_rows
left join baselines using (group_id, peers)
