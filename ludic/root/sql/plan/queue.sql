-- queue: pending groups with a row that no filter drops, and their positions in order of arrival
-- grain: one row per group_id | reads: rollouts, judged
-- queue_position: sorts groups by policy version, oldest first, then by arrival
-- apart from `groups`, which reads it, since that takes DuckDB three times as long to bind
select group_id, min({v: policy_version, a: arrival, f: file, g: row_group, r: "row"}) as queue_position
from rollouts
where group_id in (select group_id from judged where reason is null)
group by group_id
