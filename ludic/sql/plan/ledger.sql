-- ledger: the next batch as rows of the batches table, and with it all groups that lost every row
-- grain: one row per rollout_id, used ones in training order, then dropped ones | reads: considered, estimated, rollouts
-- NULL: as in schemas/batches.v1.json
with planned as (
    select *, in_batch and reason is null as used
    from considered
    where in_batch or not usable
)

select
    $attempt_id::integer as attempt_id,
    $step::bigint as step,
    (row_number() over in_order - 1)::integer as batch_index,
    planned.rollout_id,
    planned.group_id,
    env_name,
    policy_version,
    $trainer_version::bigint as trainer_version,
    $trainer_version::bigint - policy_version as lag,
    planned.file,
    planned.row_group,
    planned.row,
    prompt_length,
    response_length,
    episode_reward,
    advantage,
    used::double as weight,
    used,
    reason
from planned
inner join rollouts on rollouts.rollout_id = planned.rollout_id
left join estimated on estimated.rollout_id = planned.rollout_id
window in_order as (order by used desc, place, planned.file, planned.row_group, planned.row)
order by batch_index
