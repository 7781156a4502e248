-- num_judged: pending rollouts, and groups with a row that no filter drops
-- grain: one row | reads: judged
select count(*) as num_rollouts, count(distinct group_id) filter (reason is null) as num_kept_groups
from judged
