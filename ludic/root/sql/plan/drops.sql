-- drops: pending rollouts that a filter drops
-- grain: one row per reason | reads: judged
select reason, count(*)
from judged
where reason is not null
group by reason
order by reason
