-- steps: what agents and environments did, turn by turn
-- grain: one row per rollout_id, kind (agent or environment) and step_index | reads: rollouts
-- step_index counts from 0 within its kind; agent_steps are indexes of the agent steps that led to an environment step
-- NULL: columns of the other kind; action of an agent step whose completion could not be parsed
with agent as (
    select
        version, env, rollout_id, group_id, episode_id, env_name, policy_version,
        'agent' as kind,
        generate_subscripts(agent_steps, 1) - 1 as step_index,
        unnest(agent_steps) as step
    from rollouts
),

environment as (
    select
        version, env, rollout_id, group_id, episode_id, env_name, policy_version,
        'environment' as kind,
        generate_subscripts(environment_steps, 1) - 1 as step_index,
        unnest(environment_steps) as step
    from rollouts
)

select * exclude (step), step.* from agent
union all by name
select * exclude (step), step.* from environment
