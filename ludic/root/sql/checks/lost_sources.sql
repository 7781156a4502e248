-- lost_sources: a file that a compaction planned to replace, and whose rows are in no file
-- grain: one row per partition and file | reads: compactions, rollouts, evals, gone
-- files that expired or were quarantined are not reported, and none of requests/ and calls/, whose rows do not name
-- their source
with planned as (
    select distinct parse_dirpath(name) as partition, worker_id, sequence
    from compactions
    where not starts_with(name, 'requests/') and not starts_with(name, 'calls/')
),

stored as (
    select distinct worker_id, sequence from rollouts
    union
    select distinct worker_id, sequence from evals
)

select planned.*
from planned
anti join stored using (worker_id, sequence)
where not exists (
    select 1
    from gone
    where
        gone.partition = planned.partition
        and gone.worker_id = planned.worker_id
        and planned.sequence between gone.first_sequence and gone.last_sequence
)
order by partition, worker_id, sequence
