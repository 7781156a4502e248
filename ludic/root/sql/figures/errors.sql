-- errors: the $most most frequent errors of rollouts
-- grain: one row per environment and error, whose text is cut | reads: rollouts
select env_name, left(error, 2000) as error, count(*) as num_rollouts, max(version) as last_version
from rollouts
where error is not null
group by all
order by num_rollouts desc, error
limit $most
