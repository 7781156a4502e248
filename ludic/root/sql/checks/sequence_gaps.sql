-- sequence_gaps: missing files of a worker, which numbers its files from 0 and has written a later file
-- grain: one row per worker_id and run of missing sequences | reads: rollouts, evals, gone
-- files that expired or were quarantined are not reported; a compacted file holds the sequences that it replaced
with present as (
    select distinct worker_id, sequence as first_sequence, sequence as last_sequence from rollouts
    union
    select distinct worker_id, sequence, sequence from evals
    union
    select worker_id, first_sequence, last_sequence from gone where not starts_with(worker_id, 'compacted.')
),

reached as (
    select
        worker_id,
        first_sequence,
        coalesce(
            max(last_sequence) over (
                partition by worker_id
                order by first_sequence, last_sequence
                rows between unbounded preceding and 1 preceding
            ),
            -1
        ) as last_before
    from present
)

select worker_id, last_before + 1 as first_missing, first_sequence - 1 as last_missing
from reached
where first_sequence > last_before + 1
order by worker_id, first_missing
