-- newest_uses: the newest step that considered a rollout, its advantage, and the filter that dropped it
-- grain: one row per rollout_id | reads: batches | NULL: dropped_by of a rollout that is used
select
    rollout_id,
    max(step) as step,
    max_by(advantage, step) as advantage,
    max_by(if(used, null, reason), step) as dropped_by
from batches
group by rollout_id
