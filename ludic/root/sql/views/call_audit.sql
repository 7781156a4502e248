-- call_audit: where the sampled tokens of agents' model calls are, or why they are in no row
-- grain: one row per call_id and fate | reads: model_calls, agent_episodes, rollouts, evals
-- fate: trained, in a row with action_mask 1; context, in a row with mask 0; dropped, in none; waiting, not decided yet
-- why: open (of an episode that is open), not_assembled (its episode has no rows yet), unfinished (its gateway died before
-- the answer was stored), failed, earlier_attempt (also of an earlier run of the agent in this attempt), text (without
-- token ids), empty, quarantined (a call that it extends is missing), retry (another answer to the same request was
-- extended), unresolved (none of them was), unfit (its arrays differ in shape from those before it), undelivered
-- (sampled behind the client's stop); unexplained: a mistake of ludic
-- num_tokens: sampled tokens; start: of the first of them in response_tokens of the row
-- is_forked: it extends a call that another row goes on with, so it begins a row whose prompt holds what they share
-- num_rows: rows that train on the call, which is at most one
-- rivals: see assembly/rivals.sql, by the calls that are trained on
-- root_$number: for the lists; `ludic verify` has tables without them in the place of rollouts and evals
-- NULL: why of a trained call; rollout_id and start of a call in no row
with recursive agent_rows as (
    select rollout_id, episode_id, parent_segment_index, metadata, agent_steps
    from root_$number.rollouts
    where episode_id in (select episode_id from agent_episodes)
    union all
    select rollout_id, episode_id, parent_segment_index, metadata, agent_steps
    from root_$number.evals
    where episode_id in (select episode_id from agent_episodes)
),

indexed as (
    select
        *,
        string_split(metadata['call_ids'], ' ') as call_ids,
        unnest(range(1, len(string_split(metadata['call_ids'], ' ')) + 1)) as index
    from agent_rows
    where metadata['call_ids'] <> ''
),

trained as (
    select
        call_ids[index] as call_id,
        count(*) as num_rows,
        min(rollout_id) as rollout_id,
        min(agent_steps[index].start) as start,
        min(agent_steps[index]."end" - agent_steps[index].start) as num_tokens,
        bool_or(index = 1 and parent_segment_index is not null) as is_first
    from indexed
    group by call_ids[index]
),

context as (
    select unnest(string_split(metadata['context_call_ids'], ' ')) as call_id, rollout_id
    from agent_rows
    where metadata['context_call_ids'] <> ''
),

sound as (
    select call_id from model_calls where event = 'call' and base_call_id is null
    union all
    select model_calls.call_id
    from model_calls
    inner join sound on sound.call_id = model_calls.base_call_id
    where event = 'call'
),

extended as (
    select base_call_id, base_length
    from model_calls
    where base_call_id is not null
    group by base_call_id, base_length
    having count(*) > 1
),

answers as (
    select
        episode_id || ' ' || attempt as scope,
        call_id,
        idempotency_digest,
        retry_of,
        call_id in (select call_id from trained) as goes_on
    from model_calls
    where event = 'call'
),

rivals as ($rivals),

attempts_of as (
    select
        episode_id,
        attempt,
        is_open,
        attempt < max(attempt) over (partition by episode_id) as is_replaced,
        from_json(left_behind, '["varchar"]') as left_behind
    from agent_episodes
),

explained as (
    select
        calls.*,
        trained.num_rows,
        trained.rollout_id as trained_in,
        trained.start,
        trained.num_tokens as num_trained,
        context.rollout_id as context_in,
        coalesce(trained.is_first and extended.base_call_id is not null, false) as is_forked,
        case
            when trained.call_id is not null then null
            when context.call_id is not null then 'unfit'
            when calls.event = 'intent' then if(attempts_of.is_open, 'open', 'unfinished')
            when calls.event = 'failed' then 'failed'
            when attempts_of.is_replaced or list_contains(left_behind, calls.call_id) then 'earlier_attempt'
            when attempts_of.is_open then 'open'
            when calls.episode_id not in (select episode_id from agent_rows) then 'not_assembled'
            when calls.response_tokens is null then 'text'
            when len(calls.response_tokens) = 0 then 'empty'
            when calls.call_id not in (select call_id from sound) then 'quarantined'
            when rivals.any_goes_on then 'retry'
            when not rivals.any_goes_on then 'unresolved'
            else 'unexplained'
        end as why
    from model_calls as calls
    left join trained using (call_id)
    left join context using (call_id)
    left join rivals using (call_id)
    left join extended on extended.base_call_id = calls.base_call_id and extended.base_length = calls.base_length
    left join attempts_of on attempts_of.episode_id = calls.episode_id and attempts_of.attempt = calls.attempt
)

select
    episode_id,
    attempt,
    call_id,
    coalesce(began_at, created_at) as began_at,
    case
        when why is null then 'trained'
        when why = 'unfit' then 'context'
        when why in ('open', 'not_assembled') then 'waiting'
        else 'dropped'
    end as fate,
    why,
    coalesce(num_trained, len(response_tokens), 0)::bigint as num_tokens,
    event = 'call' as is_delivered,
    is_forked,
    coalesce(trained_in, context_in) as rollout_id,
    start,
    coalesce(num_rows, 0)::bigint as num_rows
from explained
union all by name
select
    episode_id,
    attempt,
    call_id,
    coalesce(began_at, created_at) as began_at,
    'dropped' as fate,
    'undelivered' as why,
    len(undelivered_tokens)::bigint as num_tokens,
    false as is_delivered,
    is_forked,
    null::varchar as rollout_id,
    null::integer as start,
    0::bigint as num_rows
from explained
where len(undelivered_tokens) > 0
