-- drops_by_reason: rollouts that gradient steps dropped
-- grain: one row per reason, the most frequent first | reads: batches | NULL: reward_mean if none is scored
select
    reason,
    count(*) as num_rollouts,
    count(distinct group_id) as num_groups,
    min(step) as first_step,
    max(step) as last_step,
    avg(episode_reward) as reward_mean
from batches
where not used
group by reason
order by num_rollouts desc, reason
