-- components_by_environment: mean of each component of the reward over what each gradient step considered
-- grain: one row per step, env_name and component | reads: batches, rollouts
-- only steps after $after_step; a step whose rollouts are not in this root, or have no components, has no rows
with parts as (
    select step, env_name, unnest(map_entries(reward_components)) as part
    from batches
    inner join (select rollout_id, policy_version, reward_components from rollouts) using (rollout_id, policy_version)
    where step > $after_step
)

select step, env_name, part.key as component, avg(part.value) as value_mean
from parts
where part.value is not null
group by all
order by env_name, component, step
