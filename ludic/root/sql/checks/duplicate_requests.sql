-- duplicate_requests: a request of the schedule that training used as more than one group, since two workers sampled it
-- grain: one row per group number (request_index // group_size) and pass | reads: batches, rollouts, attempts
-- online training is one pass; each attempt of offline training is a pass, since it may use groups again
-- imported rows, and rows of workers without a slot, belong to no request; expired rows are not checked
with used as (
    select distinct
        rollouts.request_index // rollouts.group_size as group_number,
        rollouts.group_id,
        ledger.step,
        case when (attempts.config ->> 'offline')::boolean then ledger.attempt_id end as offline_attempt
    from batches as ledger
    inner join rollouts using (rollout_id)
    left join attempts on attempts.attempt_id = ledger.attempt_id
    where
        ledger.used
        and ledger.root is null
        and rollouts.request_index >= 0
        and regexp_matches(rollouts.worker_id, '^w\d+-')
)

select
    group_number,
    list(distinct group_id order by group_id) as group_ids,
    list(distinct step order by step) as steps
from used
group by offline_attempt, group_number
having count(distinct group_id) > 1
order by group_number
