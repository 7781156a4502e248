-- request_episodes: the episodes of groups whose end is known
-- grain: one row per group_id and group_index | reads: requests, batches, rollouts
-- outcome: complete, failed or given_up; sampled_s: from the start of the group; place: 1 for the group's first to end
-- fate: of the episode: used, or the reason why not; that of its group, as in requests, if the ledger has no row of it
-- NULL: ended_at, policy_version, num_tokens, sampled_s and place of an episode that its worker gave up
with episodes as (
    select group_id, group_number, worker_id, env_name, started_at, fate, unnest(episodes, max_depth := 2)
    from requests
),

ledger as (
    select
        batches.group_id,
        rollouts.group_index,
        bool_or(used) as used,
        any_value(reason) filter (not used) as reason
    from batches
    join rollouts using (rollout_id)
    group by all
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
    case
        when fate is null or ledger.group_id is null then fate
        when used then 'used'
        else coalesce(reason, fate)
    end as fate
from episodes
left join ledger using (group_id, group_index)
