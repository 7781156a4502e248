-- scores: what scorers gave to stored rollouts
-- grain: one row per scorer, its version, and name of the value | reads: scores
select
    scorer,
    scorer_version,
    name,
    count(value) as num_scores,
    count(*) - count(value) as num_failed,
    avg(value) as value_mean,
    max(created_at) as last_created_at
from scores
group by scorer, scorer_version, name
order by scorer, last_created_at, scorer_version, name
