-- rollouts_of_groups: rollouts of the groups $ids of $versions, each with its first use in training
-- grain: one row per rollout_id | reads: rollouts, batches | NULL: use if no step has considered the rollout
with uses as (
    select rollout_id, arg_min(struct_pack(step, used, reason, advantage), step) as use
    from batches
    where group_id in (select unnest($ids::varchar[]))
    group by rollout_id
)

select
    group_id, group_index, agent_id, depth, rollout_id, version, episode_reward, correct, response_length,
    coalesce(error, ended_by(truncation_reason, finish_reason, parse_error)) as ending, use
from rollouts
left join uses using (rollout_id)
where version in (select unnest($versions::bigint[])) and group_id in (select unnest($ids::varchar[]))
order by group_id, group_index, depth
