-- trajectories: all rows of one agent in one episode, as one row; each counts once in a baseline
-- grain: one row per trajectory_id | reads: trajectory_rows, which says which rows those are, and what peers are
-- reward: episode_reward; first_rollout_id: the first row that is left, since a filter may drop rows
-- response_length, action_length: tokens, and sampled tokens, of all rows
-- NULL: reward of a trajectory that was not scored; correct where that is not known
select
    trajectory_id,
    any_value(group_id) as group_id,
    any_value(episode_id) as episode_id,
    any_value(agent_id) as agent_id,
    any_value(depth) as depth,
    any_value(peers) as peers,
    any_value(env_name) as env_name,
    any_value(request_index) as request_index,
    max(episode_reward) as reward,
    bool_or(correct) as correct,
    count(*) as num_rows,
    arg_min(rollout_id, segment_index) as first_rollout_id,
    sum(response_length)::bigint as response_length,
    sum(action_length)::bigint as action_length
from trajectory_rows
group by trajectory_id
