-- answers_of_example: all answers to the example $id of environment $env_name, newest versions and best rewards first
-- grain: one row per trajectory of an agent that is not a sub-agent; of one with rewritten contexts the last row
-- reads: rollouts, evals | found_in: rollouts or evals | NULL: ended_by of an answer whose end is not known
with rows as (
    select
        'rollouts' as found_in, version, rollout_id, coalesce(trajectory_id, rollout_id) as trajectory, segment_index,
        agent_id, episode_reward, correct, response_length, num_turns,
        coalesce(error, ended_by(truncation_reason, finish_reason, parse_error)) as ended_by
    from rollouts
    where env_name = $env_name and env_example_id = $id and depth = 0
    union all
    select
        'evals' as found_in, version, rollout_id, coalesce(trajectory_id, rollout_id) as trajectory, segment_index,
        agent_id, episode_reward, correct, response_length, num_turns,
        coalesce(error, ended_by(truncation_reason, finish_reason, parse_error)) as ended_by
    from evals
    where env_name = $env_name and env_example_id = $id and depth = 0
)

select * exclude (trajectory, segment_index)
from rows
qualify row_number() over (partition by found_in, version, trajectory order by segment_index desc) = 1
order by version desc, episode_reward desc nulls last, rollout_id
