-- lost_by_recorders: rollouts, ledgers and numbers that a recorder could not store, since the store failed
-- grain: one row per slot and life | reads: workers
-- steps, steps_without_metrics: from the first to the last one, which are stored as half-open intervals
select
    slot,
    life,
    worker_id,
    lost -> 'num_rollouts' as num_rollouts,
    cast([
        if(span[2] > span[1] + 1, span[1] || ' to ' || (span[2] - 1), span[1]::varchar)
        for span in cast(lost -> 'steps' as bigint[][])
    ] as varchar) as steps,
    cast([
        if(span[2] > span[1] + 1, span[1] || ' to ' || (span[2] - 1), span[1]::varchar)
        for span in cast(lost -> 'steps_without_metrics' as bigint[][])
    ] as varchar) as steps_without_metrics,
    lost -> 'reasons' as reasons
from workers
where lost is not null
