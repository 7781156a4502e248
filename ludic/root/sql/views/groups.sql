-- groups: rewards, lengths and counts of the episodes of one example
-- grain: one row per group_id | reads: rollouts
-- rewards count an episode once, also if it has several rollouts, without those of sub-agents; lengths and num_ count rollouts
-- accuracy: share of episodes with a correct answer, of those of which it is known
-- num_unparsed and num_at_other_limits leave out rollouts with an answer cut at max_tokens
-- NULL: rewards of a group without a scored episode; reward_std (of the sample) of a group with one scored episode;
-- wanted and accuracy where no row has wanted or correct
with episodes as (
    select
        version,
        env,
        group_id,
        group_key,
        env_name,
        episode_id,
        max(group_size) as group_size,
        min(policy_version) as policy_version,
        min(created_at) as created_at,
        max(episode_reward) filter (depth = 0) as reward,
        max(wanted) as wanted,
        bool_or(correct) filter (depth = 0) as correct,
        count(*) as num_rollouts,
        sum(num_turns) as num_turns,
        sum(response_length) as response_length,
        sum(action_length) as action_length,
        count(*) filter (truncated) as num_truncated,
        count(*) filter (incomplete_completion) as num_incomplete_completions,
        count(*) filter (parse_error) as num_parse_errors,
        count(*) filter (parse_error and not incomplete_completion) as num_unparsed,
        count(*) filter (truncated and not incomplete_completion) as num_at_other_limits,
        count(error) as num_errors
    from rollouts
    group by all
)
select
    group_id,
    group_key,
    env_name,
    min(policy_version) as policy_version,
    max(group_size) as group_size,
    count(*) as num_episodes,
    count(reward) as num_scored,
    sum(num_rollouts)::bigint as num_rollouts,
    avg(reward) as reward_mean,
    min(reward) as reward_min,
    max(reward) as reward_max,
    stddev_samp(reward) as reward_std,
    max(wanted) as wanted,
    avg(correct::integer) as accuracy,
    sum(num_turns) / sum(num_rollouts) as num_turns_mean,
    sum(response_length) / sum(num_rollouts) as response_length_mean,
    sum(action_length) / sum(num_rollouts) as action_length_mean,
    sum(num_truncated)::bigint as num_truncated,
    sum(num_incomplete_completions)::bigint as num_incomplete_completions,
    sum(num_parse_errors)::bigint as num_parse_errors,
    sum(num_unparsed)::bigint as num_unparsed,
    sum(num_at_other_limits)::bigint as num_at_other_limits,
    sum(num_errors)::bigint as num_errors,
    min(created_at) as created_at,
    version,
    env
from episodes
group by version, env, group_id, group_key, env_name
