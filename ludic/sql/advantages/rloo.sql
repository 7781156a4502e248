-- rloo: reward minus the mean reward of the other scored episodes of the group (leave-one-out)
-- paper: Ahmadian et al. 2024, arXiv 2402.14740, section 2.2
-- grain: one row per rollout_id | reads: rollouts
-- an agent's rollouts of an episode count once in the baseline; a group with one scored episode gets 0
-- NULL: for a rollout that was not scored
-- $noise_scale: standard deviation of normal noise against identical rewards, 0 is off; the noise depends only on
-- rollout_id and $seed (Box-Muller over an MD5), so a batch can be recomputed exactly
-- default: noise_scale = 0
-- default: seed = 0
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
    (n * (episode_reward - lowest) - total) / greatest(n - 1, 1)
        + case
            when $noise_scale > 0 then
                $noise_scale
                * sqrt(-2 * ln((md5_number_upper(rollout_id || '/' || $seed::varchar)::double + 1) / pow(2, 64)))
                * cos(2 * pi() * md5_number_lower(rollout_id || '/' || $seed::varchar)::double / pow(2, 64))
            else 0
        end as advantage
from rollouts
left join baselines on baselines.group_id = rollouts.group_id
