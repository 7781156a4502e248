-- metrics: measurements of each gradient step, and of what a worker appended
-- grain: one row per gradient step (kind train), or environment of the groups appended together (kind worker) | reads: metrics/ of the root
-- off_policy_steps_mean, off_policy_steps_max: stored as lag_mean and lag_max
-- NULL: the column does not apply to this kind
select
    $columns,
    lag_mean as off_policy_steps_mean,
    lag_max as off_policy_steps_max
from $stored
