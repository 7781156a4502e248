-- lost_by_recorders: rollouts, ledgers and numbers that a recorder could not store, since the store failed
-- grain: one row per slot and life | reads: workers
select
    slot,
    life,
    worker_id,
    lost -> 'num_rollouts' as num_rollouts,
    lost -> 'steps' as steps,
    lost -> 'steps_without_metrics' as steps_without_metrics,
    lost -> 'reasons' as reasons
from workers
where lost is not null
