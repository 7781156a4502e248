-- misplaced_rollouts: a row in the partition of another version or environment, where filters do not look for it
-- grain: one row per such rollout_id | reads: rollouts, evals
select 'rollouts' as folder, rollout_id, version, policy_version, env, env_name
from rollouts
where version is distinct from policy_version or env is distinct from env_name
union all
select 'evals' as folder, rollout_id, version, policy_version, env, env_name
from evals
where version is distinct from policy_version or env is distinct from env_name
