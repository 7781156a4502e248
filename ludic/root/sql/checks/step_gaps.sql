-- step_gaps: steps without a ledger before a step that has one
-- grain: one row per run of missing steps | reads: batches, attempts
-- a trainer that was recorded may have steps that nobody recorded: the note lost_by_recorders names those that were lost
with steps as (
    select step, bool_or((config -> 'recorded') is not null) as is_recorded
    from batches
    left join attempts using (attempt_id)
    group by step
    union all
    select 0 as step, false as is_recorded where exists (from batches)
),

neighbours as (
    select step, lead(step) over (order by step) as next_step, lead(is_recorded) over (order by step) as is_recorded
    from steps
)

select step + 1 as first_missing, next_step - 1 as last_missing
from neighbours
where next_step > step + 1 and not is_recorded
