-- examples: counts and means of the rollouts of each example, over all versions that sampled it
-- grain: one row per env_name and env_example_id | reads: rollouts
-- first_reward and last_reward: means over the lowest and the highest version that sampled the example
-- rollout_id: one of its rollouts, of version, the newest that sampled it
-- NULL: rewards of an example without a scored episode; accuracy if of none it is known whether the answer is correct
with by_version as (
    select
        env_name,
        env_example_id,
        version,
        count(*) as num_rollouts,
        count(distinct group_id) as num_groups,
        sum(episode_reward) as reward_sum,
        count(episode_reward) as num_scored,
        avg(episode_reward) as reward,
        count_if(correct) as num_correct,
        count(correct) as num_known,
        sum(response_length) as response_length,
        count(error) as num_errors,
        any_value(wanted) as wanted,
        any_value(rollout_id) as rollout_id
    from rollouts
    group by all
)

select
    env_example_id,
    env_name,
    sum(reward_sum) / nullif(sum(num_scored), 0) as reward_mean,
    min_by(reward, version) as first_reward,
    max_by(reward, version) as last_reward,
    sum(num_correct) / nullif(sum(num_known), 0) as accuracy,
    any_value(wanted) as wanted,
    sum(num_rollouts)::bigint as num_rollouts,
    sum(num_groups)::bigint as num_groups,
    count(*) as num_versions,
    sum(response_length) / sum(num_rollouts) as response_length_mean,
    sum(num_errors)::bigint as num_errors,
    max_by(rollout_id, version) as rollout_id,
    max(version) as version
from by_version
group by all
