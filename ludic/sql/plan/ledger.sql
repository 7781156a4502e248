-- ledger: the next batch as rows of the batches table, with all groups of which filters drop every row
-- grain: one row per rollout_id, used rows in the order of the selection, then dropped rows in order of arrival
-- reads: judged, chosen, estimated, weights, rollouts
-- weight: of plan/weights.sql; 1 for a used row without one
-- if rows are used in pairs ($loss_unit = 'pair'), a row without its other side is dropped as no_pair
-- a sequence is cut if prompt and response are longer than $max_seq_len, as in ludic.batches.packing
-- NULL: as in schemas/batches.v1.json
with whole_pairs as (
    select pair_id
    from estimated
    inner join judged on judged.rollout_id = estimated.rollout_id
    where reason is null and $loss_unit = 'pair'
    group by pair_id
    having count(*) > 1
),

planned as (
    select
        judged.rollout_id,
        judged.group_id,
        chosen.queue_position,
        coalesce(reason, case when $loss_unit = 'pair' and whole_pairs.pair_id is null then 'no_pair' end) as reason
    from judged
    left join chosen on chosen.group_id = judged.group_id
    left join estimated on estimated.rollout_id = judged.rollout_id
    left join whole_pairs on whole_pairs.pair_id = estimated.pair_id
    where chosen.queue_position is not null or judged.group_id not in (select group_id from judged where reason is null)
),

described as (
    select
        rollouts.*,
        reason,
        planned.queue_position is not null and reason is null as used,
        case when used then planned.queue_position end as queue_position,
        num_uses + (planned.queue_position is not null)::integer as uses,
        used
        and response_length > 0
        and coalesce(prompt_length + response_length > $max_seq_len::integer, false) as is_cut,
        min({v: policy_version, a: arrival, f: file, g: row_group, r: "row"}) over (partition by planned.group_id)
            as arrived
    from planned
    inner join rollouts on rollouts.rollout_id = planned.rollout_id
)

select
    $attempt_id::integer as attempt_id,
    $step::bigint as step,
    (row_number() over in_order - 1)::integer as batch_index,
    described.rollout_id,
    group_id,
    env_name,
    policy_version,
    $trainer_version::bigint as trainer_version,
    $trainer_version::bigint - policy_version as lag,
    $trainer_version::bigint - policy_version_last as lag_last,
    file,
    row_group,
    "row",
    prompt_length,
    response_length,
    episode_reward,
    coalesce(advantage, case when len(token_advantages) = 0 then 0 else list_avg(token_advantages) end) as advantage,
    coalesce(weights.weight, used::double) as weight,
    used,
    reason,
    case when used then token_advantages end as token_advantages,
    uses as num_uses,
    is_cut as seq_len_truncated,
    truncated or is_cut as truncated,
    coalesce(truncation_reason, case when is_cut then 'max_seq_len' end) as truncation_reason,
    case when $loss_unit = 'pair' and used then pair_id end as pair_id,
    scorer_versions
from described
left join estimated on estimated.rollout_id = described.rollout_id
left join weights on weights.rollout_id = described.rollout_id
window in_order as (order by used desc, queue_position, arrived, file, row_group, "row")
order by batch_index
