-- dr_grpo: reward minus the group's mean, not divided by its standard deviation
-- paper: Liu et al. 2025 (Understanding R1-Zero-Like Training), arXiv 2503.20783, section 3.2
-- (n - 1) / n times rloo's advantage, since the mean includes the rollout's own reward
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once in its group; a group with one scored episode gets 0
-- NULL: for a rollout that was not scored
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
        list_sum([reward - rewards[1] for reward in rewards]) as total
    from groups
)

select
    rollout_id,
    episode_reward - lowest - total / n as advantage
from rollouts
left join baselines on baselines.group_id = rollouts.group_id
