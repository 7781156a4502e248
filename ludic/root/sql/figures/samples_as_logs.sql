-- samples_as_logs: samples with the last context of each agent, as logs of inspect_ai hold them
-- grain: one row per episode of an agent | reads: eval_episodes, evals
select
    *,
    count(distinct agent_id) over (partition by env_example_id, sample_index) > 1 as has_several_agents
from eval_episodes
inner join (
    select
        version,
        env,
        episode_id,
        agent_id,
        arg_max(messages, segment_index) as messages,
        arg_max(reward_components, segment_index) as reward_components,
        arg_max(finish_reason, segment_index) as finish_reason,
        arg_max(metadata, segment_index) as metadata
    from evals
    where depth = 0
    group by all
) using (version, env, episode_id, agent_id)
order by env_example_id, sample_index, agent_id
