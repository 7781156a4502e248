-- totals_of_steps: what the gradient steps used and dropped together
-- grain: one row | reads: all_batches | NULL: last_step before the first step
-- num_superseded, num_superseded_steps: rows of steps, and steps, that a later attempt trained again
-- groups_a_step, rollouts_a_step: the fewest and the most that a step considered, of steps that count
with sizes as (
    select count(distinct group_id) as num_groups, count(*) as num_rollouts
    from all_batches
    where not superseded
    group by step
)

select
    max(step) filter (not superseded) as last_step,
    count(*) filter (used and not superseded) as num_used,
    count(*) filter (not used and not superseded) as num_dropped,
    avg(off_policy_steps) filter (used and not superseded) as off_policy_steps_mean,
    count(*) filter (superseded) as num_superseded,
    count(distinct (attempt_id, step)) filter (superseded) as num_superseded_steps,
    (select [min(num_groups), max(num_groups)] from sizes) as groups_a_step,
    (select [min(num_rollouts), max(num_rollouts)] from sizes) as rollouts_a_step
from all_batches
