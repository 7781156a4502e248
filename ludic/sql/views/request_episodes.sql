-- request_episodes: the episodes of groups whose end is known
-- grain: one row per group_id and group_index | reads: requests
-- outcome: complete, failed or given_up; sampled_s: from the start of the group; place: 1 for the group's first to end
-- fate: of the group, as in requests
-- NULL: ended_at, policy_version, num_tokens, sampled_s and place of an episode that was given up
with episodes as (
    select group_id, group_number, worker_id, env_name, started_at, fate, unnest(episodes, max_depth := 2)
    from requests
)

select
    group_id,
    group_index,
    group_number,
    worker_id,
    env_name,
    outcome,
    policy_version,
    num_tokens,
    started_at,
    ended_at,
    epoch(ended_at - started_at) as sampled_s,
    case when ended_at is not null then row_number() over (partition by group_id order by ended_at nulls last) end
        as place,
    fate
from episodes
