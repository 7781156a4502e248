-- orphan_attempts: an attempt whose parent is missing or not older, which breaks its chain
-- grain: one row per such attempt_id | reads: attempts
select child.attempt_id, child.parent_attempt, child.parent_step
from attempts as child
left join attempts as parent on parent.attempt_id = child.parent_attempt
where child.parent_attempt is not null and (parent.attempt_id is null or parent.attempt_id >= child.attempt_id)
