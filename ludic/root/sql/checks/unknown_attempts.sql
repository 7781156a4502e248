-- unknown_attempts: a ledger or a policy of an attempt that is not recorded, so it is unknown whether it is superseded
-- grain: one row per such attempt_id | reads: all_batches, policies, attempts
with mentioned as (
    select attempt_id, 'batches' as folder, step from all_batches
    union all
    -- Attempt 0 is no trainer's: a worker without a trainer publishes the first model.
    select attempt_id, 'policies' as folder, step from policies where attempt_id > 0
)

select attempt_id, list(distinct folder order by folder) as folders, min(step) as first_step, max(step) as last_step
from mentioned
anti join attempts using (attempt_id)
group by attempt_id
order by attempt_id
