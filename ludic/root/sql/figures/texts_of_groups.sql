-- texts_of_groups: the beginning of the question of groups $ids of $versions
-- grain: one row per group_id | reads: rollouts | NULL: of a group without a message of the user
select
    group_id as id,
    left(any_value(list_filter(messages, lambda message: message.role = 'user')[1].content), 200) as prompt
from rollouts
where
    list_contains($versions::bigint[], version) and list_contains($ids::varchar[], group_id)
    and group_index = 0 and depth = 0 and segment_index = 0
group by group_id
