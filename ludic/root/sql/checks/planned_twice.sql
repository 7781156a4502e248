-- planned_twice: a group that the run used more often than max_uses, that was considered again after it was dropped,
-- or whose rollouts are repeated within one step; offline training, replays and trainers that were recorded may use
-- groups again, so for them only repeats within one step are found
-- grain: one row per such group_id | reads: batches, attempts
with steps as (
    select
        group_id,
        step,
        bool_or(used) as used,
        count(*) - count(distinct rollout_id) as num_repeated,
        max(coalesce((config ->> 'max_uses')::integer, 1)) as max_uses,
        not bool_or(
            coalesce((config ->> 'offline')::boolean, false)
            or config ->> 'replay_batches' is not null
            or (config -> 'recorded') is not null
        ) as online
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
having
    count(*) filter (used and online) > max(max_uses)
    or max(step) filter (online) > min(step) filter (not used and online)
    or sum(num_repeated) > 0
