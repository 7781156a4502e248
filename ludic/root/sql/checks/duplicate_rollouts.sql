-- duplicate_rollouts: a rollout_id that is stored more than once
-- grain: one row per such rollout_id | reads: rollouts
with named as (
    select rollout_id, worker_id || '-' || sequence as file
    from rollouts
)

select rollout_id, count(*) as num_rows, list(distinct file order by file) as files
from named
group by rollout_id
having count(*) > 1
order by rollout_id
