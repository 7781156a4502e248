-- dr_grpo: reward minus the group's mean, not divided by its standard deviation
-- paper: Liu et al. 2025 (Understanding R1-Zero-Like Training), arXiv 2503.20783, section 3.2
-- (n - 1) / n of rloo's, since the own reward is part of the mean
-- grain: one row per rollout_id | reads: rollouts
-- an episode of several rollouts counts once in the group; a group of one scored episode gets 0
-- NULL: the rollout was not scored
with episodes as (
    select group_id, episode_id, max(episode_reward) as reward
    from rollouts
    where episode_reward is not null
    group by group_id, episode_id
),

-- in order, so that no bit of a sum depends on threads
groups as (
    select group_id, list(reward order by reward) as rewards
    from episodes
    group by group_id
),

-- above the lowest reward, so that equal rewards give exactly 0 and large ones lose no digits
baselines as (
    select
        group_id,
        len(rewards) as n,
        rewards[1] as lowest,
        list_sum([reward - rewards[1] for reward in rewards]) as total
    from groups
)

select
    rollout_id,
    episode_reward - lowest - total / n as advantage
from rollouts
left join baselines on baselines.group_id = rollouts.group_id
