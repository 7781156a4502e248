-- attempts: each start of a trainer, with the checkpoint that it resumed from
-- grain: one row per attempt_id | reads: attempts/ of the root
-- config: the trainer's settings as JSON text
-- numerics: facts that the last bits of weights depend on, such as threads, versions and processors, as JSON text
-- NULL: parent_attempt and parent_step of a trainer that started from the run's first weights; numerics of old attempts
select $columns
from $stored
