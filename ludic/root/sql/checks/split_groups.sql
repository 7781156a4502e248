-- split_groups: a group whose rows were written to more than one file; readers expect a group in one file
-- grain: one row per such group_id | reads: rollouts
select group_id, count(distinct worker_id || '-' || sequence) as num_files, list(distinct version) as versions
from rollouts
group by group_id
having count(distinct worker_id || '-' || sequence) > 1
