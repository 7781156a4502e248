-- workers: each life of a worker, and the slot of the schedule that it sampled
-- grain: one row per slot and life | reads: workers/ of the root
-- the newest life of a slot holds it; an older one ends at its next look
-- NULL: ended_at of a worker that lives, or was killed
select $columns
from (
    from $empty.workers
    union all by name
    from read_json($root || '/workers/*/*.json', columns = $types, hive_partitioning = false, allow_empty = true)
)
