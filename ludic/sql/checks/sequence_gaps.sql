-- sequence_gaps: files that a worker must have written, since a later one is there, and that are not
-- grain: one row per worker_id and run of missing sequences | reads: rollouts, evals
-- files before a worker's oldest are not missed: they may have expired
with files as (
    select distinct worker_id, sequence from rollouts
    union
    select distinct worker_id, sequence from evals
),

neighbours as (
    select worker_id, sequence, lead(sequence) over (partition by worker_id order by sequence) as next_sequence
    from files
)

select worker_id, sequence + 1 as first_missing, next_sequence - 1 as last_missing
from neighbours
where next_sequence > sequence + 1
