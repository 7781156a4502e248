-- misplaced_rollouts: a group in the partition of another version or environment, where filters do not look for it
-- grain: one row per group_id, partition and env_name | reads: rollouts, evals
-- a group lies where the oldest of its rollouts belongs
with partitions as (
    select 'rollouts' as folder, group_id, version, env, env_name, min(policy_version) as policy_version
    from rollouts
    group by all
    union all
    select 'evals' as folder, group_id, version, env, env_name, min(policy_version) as policy_version
    from evals
    group by all
)

select *
from partitions
where version is distinct from policy_version or env is distinct from env_name
