-- texts_of_rollouts: the beginnings of the question and of the last answer of rollouts $ids of $versions
-- grain: one row per rollout_id | reads: $rows, which is rollouts or evals; see ludic.root.sql.reports.texts
-- NULL: of a rollout without a message of the user, or of the assistant
-- `in (select unnest(...))` would be a join, for which DuckDB reads the messages of all rows
select
    rollout_id as id,
    left(list_filter(messages, lambda message: message.role = 'user')[1].content, 200) as prompt,
    left(list_filter(messages, lambda message: message.role = 'assistant')[-1].content, 200) as answer
from $rows
where list_contains($versions::bigint[], version) and list_contains($ids::varchar[], rollout_id)
