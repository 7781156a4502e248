-- attempts: starts of trainers
-- grain: one row per attempt | reads: attempts, attempt_chain | on_chain is false for those that a later one replaced
select attempt_id, parent_attempt, parent_step, owner, created_at, first_step is not null as on_chain
from attempts
left join attempt_chain using (attempt_id)
order by attempt_id
