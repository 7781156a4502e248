-- duplicate_rollouts: a rollout_id that is stored more than once
-- grain: one row per such rollout_id | reads: rollouts
select rollout_id, count(*) as num_rows, list(distinct worker_id || '-' || sequence) as files
from rollouts
group by rollout_id
having count(*) > 1
