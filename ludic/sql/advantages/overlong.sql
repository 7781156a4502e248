-- overlong: grpo over a reward that is up to 1 lower for long responses (soft overlong punishment)
-- paper: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13
-- punishment: 0 up to $max_length - $margin tokens, then falling linearly to -1 at $max_length
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once, with its longest response; a group with one scored episode gets 0
-- NULL: for a rollout that was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with episodes as (
    select
        group_id,
        episode_id,
        agent_id,
        max(episode_reward) - least(1, greatest(0, (max(response_length) - ($max_length - $margin)) / $margin)) as reward
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
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std
    from groups
)

select
    rollout_id,
    (reward - lowest - mean) / (coalesce(std, 0) + $epsilon) as advantage
from rollouts
left join episodes on
    episodes.group_id = rollouts.group_id
    and episodes.episode_id = rollouts.episode_id
    and episodes.agent_id = rollouts.agent_id
left join baselines on baselines.group_id = rollouts.group_id
