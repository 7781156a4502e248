-- steps_by_environment: means of the rollouts that each gradient step considered, used or dropped
-- grain: one row per step and env_name | reads: batches
-- signal: share of groups whose rewards differ; others have no advantage
-- NULL: reward_mean without a scored rollout; signal without a group of two scored rollouts; truncated before batches 1.4
with groups as (
    select
        step,
        env_name,
        group_id,
        case when count(episode_reward) > 1 then max(episode_reward) > min(episode_reward) end as has_signal,
        sum(episode_reward) as reward,
        count(episode_reward) as num_scored,
        sum(response_length) as response_length,
        count(*) as num_rollouts,
        sum(truncated::integer) as num_truncated
    from batches
    group by step, env_name, group_id
)

select
    step,
    env_name,
    sum(reward) / nullif(sum(num_scored), 0) as reward_mean,
    sum(response_length) / sum(num_rollouts) as response_length_mean,
    sum(num_truncated) / sum(num_rollouts) as truncated_fraction,
    avg(has_signal::integer) as signal
from groups
group by step, env_name
order by step, env_name
