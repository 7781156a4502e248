-- grpo: reward minus the group's mean, over its standard deviation
-- paper: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.2; the paper leaves open which
-- standard deviation: as in TRL and verl it is the sample's (n - 1)
-- grain: one row per rollout_id | reads: rollouts
-- an episode of several rollouts counts once in the group; a group of one scored episode gets 0
-- NULL: the rollout was not scored
-- $epsilon is added to the standard deviation: 1e-6 as in verl; TRL adds 1e-4
-- default: epsilon = 1e-6
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
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std,
        list_sum([reward - rewards[1] for reward in rewards]) as total
    from groups
)

select
    rollout_id,
    (episode_reward - lowest - total / n) / (coalesce(std, 0) + $epsilon) as advantage
from rollouts
left join baselines on baselines.group_id = rollouts.group_id
