-- totals_of_steps: what the gradient steps used and dropped together
-- grain: one row | reads: all_batches | NULL: last_step before the first step
-- num_superseded, num_superseded_steps: rows of steps, and steps, that a later attempt trained again
select
    max(step) filter (not superseded) as last_step,
    count(*) filter (used and not superseded) as num_used,
    count(*) filter (not used and not superseded) as num_dropped,
    avg(off_policy_steps) filter (used and not superseded) as off_policy_steps_mean,
    count(*) filter (superseded) as num_superseded,
    count(distinct (attempt_id, step)) filter (superseded) as num_superseded_steps
from all_batches
