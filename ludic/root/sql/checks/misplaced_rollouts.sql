-- misplaced_rollouts: a group in the partition of another version or environment, where partition filters miss it
-- grain: one row per group_id, partition and env_name | reads: rollouts, evals
-- a group belongs in the partition of its oldest policy_version
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
