-- attempts: each start of a trainer, with the checkpoint that it resumed from
-- grain: one row per attempt_id | reads: attempts/ of the root
-- config: the trainer's settings as JSON text
-- numerics: facts that the last bits of weights depend on, such as threads, versions and processors, as JSON text
-- NULL: parent_attempt and parent_step of a trainer that started from the run's first weights; numerics of old attempts
select $columns
from (
    from $empty.attempts
    union all by name
    from read_json(files_of_$number('attempts/*.json'), columns = $types, hive_partitioning = false, allow_empty = true)
)
