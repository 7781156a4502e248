-- unplanned: the pending rows after a plan: those of groups that it neither dropped nor used for the last time
-- grain: one row per rollout_id | reads: rollouts, chosen, judged | $max_uses: uses of a group
-- it replaces the table: deleted rows would slow every later plan, by a quarter after 800 steps
select * replace (num_uses + (group_id in (select group_id from chosen))::integer as num_uses)
from rollouts
where
    group_id in (select group_id from judged where reason is null)
    and (num_uses + 1 < $max_uses or group_id not in (select group_id from chosen))
