-- steps_before_version: gradient steps that began before version $first_kept
-- grain: one row per attempt and step | reads: all_batches
select distinct attempt_id, step
from all_batches
where trainer_version < $first_kept
