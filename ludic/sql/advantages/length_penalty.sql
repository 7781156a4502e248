-- length_penalty: rloo over a reward that prefers the shorter responses of a group
-- paper: Kimi k1.5, arXiv 2501.12599, section 2.3.3: with L = 0.5 - (length - shortest) / (longest - shortest),
-- a success gets L more, a failure min(0, L); nothing if all lengths are equal
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once, with its longest response; a group with one scored episode gets 0
-- NULL: for a rollout that was not scored
-- $length_weight multiplies the length reward | $success: minimum reward of a successful episode
-- default: length_weight = 1.0
-- default: success = 1.0
with lengths as (
    select group_id, episode_id, agent_id, max(episode_reward) as reward, max(response_length) as length
    from rollouts
    where episode_reward is not null
    group by group_id, episode_id, agent_id
),

scaled as (
    select
        *,
        coalesce(0.5 - (length - min(length) over g)::double / nullif(max(length) over g - min(length) over g, 0), 0)
            as brevity
    from lengths
    window g as (partition by group_id)
),

episodes as (
    select
        group_id,
        episode_id,
        agent_id,
        reward + $length_weight * case when reward >= $success then brevity else least(0, brevity) end as reward
    from scaled
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

select rollout_id, (n * (reward - lowest) - total) / greatest(n - 1, 1) as advantage
from rollouts
left join episodes on
    episodes.group_id = rollouts.group_id
    and episodes.episode_id = rollouts.episode_id
    and episodes.agent_id = rollouts.agent_id
left join baselines on baselines.group_id = rollouts.group_id
