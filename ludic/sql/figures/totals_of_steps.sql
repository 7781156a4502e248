-- totals_of_steps: what the gradient steps used and dropped together
-- grain: one row | reads: batches | NULL: last_step before the first step
select
    max(step) as last_step,
    count(*) filter (used) as num_used,
    count(*) filter (not used) as num_dropped,
    avg(off_policy_steps) filter (used) as off_policy_steps_mean
from batches
