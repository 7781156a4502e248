-- outcomes_by_step: rollouts that each gradient step used, and dropped by reason
-- grain: one row per step and outcome, the used ones first | reads: batches
with outcomes as (select step, used, if(used, 'used', 'dropped by ' || coalesce(reason, '?')) as outcome from batches)

select step, outcome, count(*) as num_rollouts
from outcomes
group by step, used, outcome
order by used desc, outcome, step
