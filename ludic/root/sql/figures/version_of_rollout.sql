-- version_of_rollout: the partition of rollout $id
-- grain: one row, none if no file has it | reads: rollouts, evals
select version from rollouts
where rollout_id = $id
union
select version from evals
where rollout_id = $id
