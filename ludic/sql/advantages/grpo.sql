-- grpo: reward minus the group's mean, divided by the group's standard deviation
-- paper: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.2; the paper does not say which
-- standard deviation; this is the sample's (n - 1), as in TRL and verl
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once in its group; a group with one scored episode gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation: 1e-6 as in verl; TRL adds 1e-4
-- default: epsilon = 1e-6
with episodes as (
    select group_id, episode_id, agent_id, max(episode_reward) as reward
    from rollouts
    where episode_reward is not null
    group by group_id, episode_id, agent_id
),

-- sorted, so that sums are bit-identical for any number of threads
groups as (
    select group_id, list(reward order by reward) as rewards
    from episodes
    group by group_id
),

-- relative to the lowest reward: equal rewards give exactly 0, and large rewards lose no digits
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
