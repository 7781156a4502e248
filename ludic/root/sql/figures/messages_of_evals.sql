-- messages_of_evals: conversations and wanted answers of evals $ids of $versions
-- grain: one row per rollout_id | reads: evals
-- `in (select unnest(...))` would be a join, for which DuckDB reads the messages of all rows
select rollout_id, wanted, messages
from evals
where list_contains($versions::bigint[], version) and list_contains($ids::varchar[], rollout_id)
