-- steps_by_column: means of the rollouts that each gradient step considered, used or dropped, by a value of theirs
-- grain: one row per step and value | reads: batches, rollouts | only steps after $after_step
-- $value, $stored_value: expressions over both, and over rollouts alone; see ludic.root.sql.reports.steps_by
-- signal: share of groups whose rewards differ; others have no advantage
-- NULL: reward_mean without a scored rollout; signal without a group of two scored rollouts; truncated_fraction before
-- batches 1.4; error_fraction, and most values, if the rollouts are not in this root
with considered as (
    select
        step,
        $value as value,
        group_id,
        episode_reward,
        response_length,
        truncated::integer as truncated,
        if(stored.rollout_id is not null, (stored.error is not null)::integer, null) as failed
    from batches
    left join (select rollout_id, policy_version, error, $stored_value as value from rollouts) as stored using (rollout_id, policy_version)
    where step > $after_step
),

groups as (
    select
        step,
        value,
        case
            when count(episode_reward) > 1 then max(comparable_reward(episode_reward)) > min(comparable_reward(episode_reward))
        end as has_signal,
        sum(episode_reward) as reward,
        count(episode_reward) as num_scored,
        sum(response_length) as response_length,
        count(*) as num_rollouts,
        sum(truncated) as num_truncated,
        sum(failed) as num_failed,
        count(failed) as num_stored
    from considered
    group by step, value, group_id
)

select
    step,
    value,
    sum(reward) / nullif(sum(num_scored), 0) as reward_mean,
    sum(response_length) / sum(num_rollouts) as response_length_mean,
    avg(has_signal::integer) as signal,
    sum(num_truncated) / sum(num_rollouts) as truncated_fraction,
    sum(num_failed) / nullif(sum(num_stored), 0) as error_fraction
from groups
group by step, value
order by step, value
