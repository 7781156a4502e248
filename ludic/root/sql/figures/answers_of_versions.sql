-- answers_of_versions: answers of $versions to the example $id of environment $env_name, the best of a version first
-- grain: one row per trajectory, the last one of a rewritten context, at most $most of a version after its first $skip
-- reads: rollouts, evals | without rows of sub-agents | found_in: rollouts or evals
-- NULL: ended_by of an answer whose end is not known
with rows as (
    select
        'rollouts' as found_in, version, rollout_id, trajectory_id, segment_index, agent_id, episode_reward, correct,
        wanted, response_length, num_turns, temperature,
        coalesce(error, ended_by(truncation_reason, finish_reason, parse_error)) as ended_by
    from rollouts
    where list_contains($versions::bigint[], version)
        and env_name = $env_name and env_example_id = $id and depth = 0
    union all
    select
        'evals' as found_in, version, rollout_id, trajectory_id, segment_index, agent_id, episode_reward, correct,
        wanted, response_length, num_turns, temperature,
        coalesce(error, ended_by(truncation_reason, finish_reason, parse_error)) as ended_by
    from evals
    where list_contains($versions::bigint[], version)
        and env_name = $env_name and env_example_id = $id and depth = 0
),

answers as (
    from rows
    qualify row_number() over (
        partition by found_in, version, coalesce(trajectory_id, rollout_id)
        order by segment_index desc
    ) = 1
),

places as (
    select *, row_number() over (partition by version order by episode_reward desc nulls last, rollout_id) as place
    from answers
)

select * exclude (trajectory_id, segment_index)
from places
where place > $skip and place <= $skip + $most
order by version desc, place
