-- lost_rollouts: a ledger row whose rollout is in no file
-- grain: one row per attempt_id, step and rollout_id | reads: all_batches, rollouts, gone
-- rollouts that expired, were quarantined, or are in another root are not reported
with missing as (
    select *, regexp_extract(file, '([^/]+)-(\d+)\.parquet$', ['worker_id', 'sequence']) as source
    from all_batches
    anti join rollouts using (rollout_id)
    where root is null
)

select attempt_id, step, rollout_id, policy_version, file
from missing
where not exists (
    select 1
    from gone
    where
        gone.partition = parse_dirpath(missing.file)
        and gone.worker_id = missing.source.worker_id
        and try_cast(missing.source.sequence as bigint) between gone.first_sequence and gone.last_sequence
)
