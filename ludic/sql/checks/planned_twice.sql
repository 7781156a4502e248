-- planned_twice: a group that the run as it stands used more often than its trainers were to (max_uses), that came
-- again after it was dropped, or whose rollouts stand several times in one step
-- grain: one row per such group_id | reads: batches, attempts
with steps as (
    select
        group_id,
        step,
        bool_or(used) as used,
        count(*) - count(distinct rollout_id) as num_repeated,
        max(coalesce((config ->> 'max_uses')::integer, 1)) as max_uses
    from batches
    left join attempts using (attempt_id)
    group by group_id, step
)

select
    group_id,
    list(step order by step) as steps,
    count(*) filter (used) as num_uses,
    max(max_uses) as max_uses,
    sum(num_repeated)::bigint as num_repeated
from steps
group by group_id
having num_uses > max(max_uses) or max(step) > min(step) filter (not used) or sum(num_repeated) > 0
