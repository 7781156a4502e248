-- drops: rollouts that gradient steps dropped
-- grain: one row per reason | reads: batches
select reason, count(*) as num_rollouts
from batches
where not used
group by reason
order by all
