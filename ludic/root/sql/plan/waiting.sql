-- waiting: groups that wait for scorers, and the rollouts that each scorer has not answered
-- grain: one row per scorer of $scorers | reads: waiting, found_scores
select
    wanted.scorer,
    count(distinct waiting.group_id) as num_groups,
    count(distinct waiting.rollout_id) as num_rollouts
from (select unnest($scorers) as scorer) as wanted
cross join waiting
anti join found_scores on found_scores.rollout_id = waiting.rollout_id and found_scores.scorer = wanted.scorer
where waiting.error is null and refusal is null
group by wanted.scorer
order by wanted.scorer
