-- code_of_rollout: the environment and users' scorers that scored a rollout, and the advantages of $attempts
-- grain: one row per use of code | reads: code
-- $worker_id, $env_name: of the rollout
select attempt_id, slot, life, role, name, sha256, path, package
from code
where
    (worker_id = $worker_id and (name = $env_name or (role = 'scorer' and starts_with($env_name, 'qa/'))))
    or (role = 'advantage' and list_contains($attempts, attempt_id))
order by attempt_id nulls first, role
