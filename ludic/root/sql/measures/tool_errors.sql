-- tool_errors: failed tool calls of an episode, without those of sub-agents
-- grain: one row per episode and agent | reads: eval_episodes, evals
with calls as (
    select
        episode_id,
        agent_id,
        list_sum([len([call for call in step.tool_calls if call.error is not null]) for step in agent_steps])
            as num_errors
    from evals
    where depth = 0
)

select
    any_value(evaluation) as evaluation,
    any_value(policy_version) as policy_version,
    any_value(env_name) as env_name,
    any_value(env_example_id) as env_example_id,
    coalesce(sum(num_errors), 0)::double as value,
    null as num_trials -- a count, never a share
from eval_episodes
inner join calls using (episode_id, agent_id)
group by episode_id, agent_id
