-- messages_of_rollouts: conversations and wanted answers of rollouts $ids of $versions
-- grain: one row per rollout_id | reads: rollouts
-- `in (select unnest(...))` would be a join, for which DuckDB reads the messages of all rows
select rollout_id, wanted, messages
from rollouts
where list_contains($versions::bigint[], version) and list_contains($ids::varchar[], rollout_id)
