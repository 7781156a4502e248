-- overlong: grpo over a reward from which long responses lose up to 1 (soft overlong punishment)
-- paper: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13
-- 0 up to $max_length - $margin tokens, then falling linearly to -1 at $max_length
-- grain: one row per rollout_id | reads: rollouts
-- an episode of several rollouts counts once, as long as its longest row; a group of one scored episode gets 0
-- NULL: the rollout was not scored
-- $epsilon is added to the standard deviation, see grpo
-- default: epsilon = 1e-6
with episodes as (
    select
        group_id,
        episode_id,
        max(episode_reward) - least(1, greatest(0, (max(response_length) - ($max_length - $margin)) / $margin)) as reward
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
        rewards[1] as lowest,
        list_avg([reward - rewards[1] for reward in rewards]) as mean,
        list_stddev_samp([reward - rewards[1] for reward in rewards]) as std
    from groups
)

select
    rollout_id,
    (reward - lowest - mean) / (coalesce(std, 0) + $epsilon) as advantage
from rollouts
left join episodes on episodes.group_id = rollouts.group_id and episodes.episode_id = rollouts.episode_id
left join baselines on baselines.group_id = rollouts.group_id
