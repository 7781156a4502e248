-- consider: each pending row, the first filter that drops it, and whether its group makes the next batch
-- grain: one row per rollout_id | reads: rollouts | the planner puts the filters in, named by $filter_names
-- groups queue by their weights, oldest first, then in the order in which they were read
-- usable: a row of the group is left | in_batch: among the first $groups_per_batch usable groups
-- NULL: reason of a row that no filter drops
with judged as (
    select
        rollout_id, group_id, arrival, file, row_group, "row", policy_version,
        $filter_names[list_position([$predicates], true)] as reason
    from rollouts
),

groups as (
    select
        group_id,
        bool_or(reason is null) as usable,
        min({v: policy_version, a: arrival, f: file, g: row_group, r: "row"}) as place
    from judged
    group by group_id
),

queue as (
    select group_id, usable, place, count(*) filter (usable) over (order by place) as num_usable
    from groups
)

select
    rollout_id, judged.group_id, file, row_group, "row", reason, usable, place,
    usable and num_usable <= $groups_per_batch as in_batch
from judged
inner join queue on queue.group_id = judged.group_id
