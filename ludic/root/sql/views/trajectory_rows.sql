-- trajectory_rows: the trajectory of each rollout, which is all rows of one agent in one episode
-- grain: one row per rollout_id | reads: rollouts | view trajectories: the same, one row per trajectory
-- two sub-agents of one agent_id in an episode (siblings) are two trajectories, and so are a child and its parent
-- trajectory_id: rollout_id of the trajectory's first row. Rows before rollouts 1.4 lack it. There the rows of one
-- episode_id, agent_id, parent_rollout_id and episode_reward belong together: each with the lowest segment_index begins
-- a trajectory, and the others belong to the one of these with the lowest rollout_id
-- peers: trajectories with equal peers share a baseline: 'environment' for all agents of the environment, such as the
-- players of a game; for sub-agents their agent_id and depth
-- NULL: episode_reward of a rollout that was not scored
-- known names its columns: a star of 50 of them, twice, costs DuckDB half a millisecond in each query
with known as (
    select
        rollout_id,
        group_id,
        episode_id,
        agent_id,
        depth,
        segment_index,
        env_name,
        request_index,
        episode_reward,
        correct,
        response_length,
        action_length,
        trajectory_id
    from rollouts
    where trajectory_id is not null
    union all
    select
        rollout_id,
        group_id,
        episode_id,
        agent_id,
        depth,
        segment_index,
        env_name,
        request_index,
        episode_reward,
        correct,
        response_length,
        action_length,
        case
            when segment_index = first_value(segment_index) over alike then rollout_id
            else first_value(rollout_id) over alike
        end as trajectory_id
    from rollouts
    where trajectory_id is null
    -- a hash, since 64 bits compare faster than text
    window alike as (
        partition by hash(group_id, episode_id, agent_id, parent_rollout_id, episode_reward)
        order by segment_index, rollout_id
    )
)

select
    rollout_id,
    trajectory_id,
    case when depth = 0 then 'environment' else agent_id || ', depth ' || depth end as peers,
    group_id,
    episode_id,
    agent_id,
    depth,
    segment_index,
    env_name,
    request_index,
    episode_reward,
    correct,
    response_length,
    action_length
from known
