-- steps: steps of agents and environments, turn by turn
-- grain: one row per rollout_id, kind (agent or environment) and step_index | reads: rollouts
-- step_index counts from 0 within its kind; agent_steps are indexes of the agent steps that led to an environment step
-- incomplete_completion: the completion reached max_tokens; of an environment step: a completion that led to it did
-- a text that is stored as the index of a message (schema 1.1) is replaced by that message's content
-- NULL: columns of the other kind; action of an agent step whose completion could not be parsed
with agent as (
    select
        version, env, rollout_id, group_id, episode_id, env_name, policy_version, messages,
        'agent' as kind,
        generate_subscripts(agent_steps, 1) - 1 as step_index,
        unnest(agent_steps, max_depth := 2)
    from rollouts
),

environment as (
    select
        version, env, rollout_id, group_id, episode_id, env_name, policy_version, messages,
        'environment' as kind,
        agent_steps as completions,
        generate_subscripts(environment_steps, 1) - 1 as step_index,
        unnest(environment_steps, max_depth := 2)
    from rollouts
)

select
    * exclude (messages, action_message)
    replace (coalesce(action, messages[action_message + 1].content) as action),
    coalesce(finish_reason = 'length', false) as incomplete_completion
from agent
union all by name
select
    * exclude (messages, completions, observation_message, action_message, next_observation_message)
    replace (
        coalesce(observation, messages[observation_message + 1].content) as observation,
        coalesce(action, messages[action_message + 1].content) as action,
        coalesce(next_observation, messages[next_observation_message + 1].content) as next_observation
    ),
    coalesce('length' in [completions[step + 1].finish_reason for step in agent_steps], false)
        as incomplete_completion
from environment
