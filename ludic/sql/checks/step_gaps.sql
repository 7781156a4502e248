-- step_gaps: steps without a ledger before a step that has one
-- grain: one row per run of missing steps | reads: batches
with steps as (
    select distinct step from batches
    union
    select 0 as step where exists (from batches)
),

neighbours as (
    select step, lead(step) over (order by step) as next_step
    from steps
)

select step + 1 as first_missing, next_step - 1 as last_missing
from neighbours
where next_step > step + 1
