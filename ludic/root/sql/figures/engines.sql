-- engines: engines that sampled rollouts, with their versions
-- grain: one row per engine | reads: rollouts
select distinct engine
from rollouts
where engine is not null
order by engine
