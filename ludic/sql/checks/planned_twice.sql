-- planned_twice: a group that the run as it stands used or dropped at several steps, or several times at one
-- grain: one row per such group_id | reads: batches
select group_id, list(distinct step) as steps, count(*) as num_rows, count(distinct rollout_id) as num_rollouts
from batches
group by group_id
having count(distinct step) > 1 or count(*) > count(distinct rollout_id)
