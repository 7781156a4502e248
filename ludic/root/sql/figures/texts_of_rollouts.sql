-- texts_of_rollouts: the beginnings of question and last answer, and the reward's components, of rollouts $ids of $versions
-- grain: one row per rollout_id | reads: $rows, which is rollouts or evals; see ludic.root.sql.reports.texts
-- NULL: of a rollout without a message of the user, or of the assistant; components of one without any
-- `in (select unnest(...))` would be a join, for which DuckDB reads the messages of all rows
select
    rollout_id as id,
    left(list_filter(messages, lambda message: message.role = 'user')[1].content, 200) as prompt,
    left(list_filter(messages, lambda message: message.role = 'assistant')[-1].content, 200) as answer,
    array_to_string(list_transform(map_entries(reward_components), lambda it: it.key || ' ' || round(it.value, 4)), ', ') as components
from $rows
where list_contains($versions::bigint[], version) and list_contains($ids::varchar[], rollout_id)
