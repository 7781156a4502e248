-- plan: where the completion of each call belongs: its parent, its segment, and whether it is trained on, or why not
-- grain: one row per episode_id, attempt and call_id | reads: call_events, call_prefixes
-- call_events: rows of the table calls; a call may have several, of which its answer counts, else its failure
-- call_prefixes: digest of the first `length` units (tokens, or messages of a call without token ids) of a call's prompt,
-- and with is_whole of its prompt and completion; calls of the same `unit` are compared
-- parent_call_id: the earlier call whose prompt and completion are the longest beginning of this prompt; of equal ones
-- the first
-- retries: calls with the same request, the same idempotency key, or of which one names the other; the one counts that a
-- later call extends; if none is extended, none counts (unresolved)
-- segment_call_id: first call of the segment; of the children of a call one goes on with its segment, the first that was
-- extended, else the first; each other child begins a segment
-- is_current: false for calls of an attempt that a later attempt replaced
-- has_whole: false for a call whose earlier calls are missing, so that its prompt is not known
-- NULL: parent_call_id of a call that extends none; segment columns of a call that is not trained on; reason of one that is
with recursive calls as (
    select
        * exclude (prompt_length),
        coalesce(began_at, created_at) as since,
        row_number() over (partition by episode_id, attempt order by coalesce(began_at, created_at), call_id) as number
    from call_events
    qualify
        row_number() over (
            partition by episode_id, attempt, call_id
            order by list_position(['call', 'failed', 'intent'], event), created_at
        ) = 1
),

wholes as (
    select calls.episode_id, calls.attempt, calls.call_id, calls.number, unit, length, digest
    from calls
    inner join call_prefixes using (episode_id, attempt, call_id)
    where event = 'call' and is_whole
),

parents as (
    select
        calls.episode_id,
        calls.attempt,
        calls.call_id,
        arg_max(wholes.call_id, {length: wholes.length, earliest: -wholes.number}) as parent_call_id
    from calls
    inner join call_prefixes using (episode_id, attempt, call_id)
    inner join wholes
        on
            wholes.episode_id = calls.episode_id
            and wholes.attempt = calls.attempt
            and wholes.unit = call_prefixes.unit
            and wholes.length = call_prefixes.length
            and wholes.digest = call_prefixes.digest
            and wholes.number < calls.number
    where not is_whole
    group by calls.episode_id, calls.attempt, calls.call_id
),

extended as (
    select distinct episode_id, attempt, parent_call_id as call_id from parents
),

same as (
    select episode_id, attempt, call_id, 'request ' || request_digest as request from calls
    union all
    select episode_id, attempt, call_id, 'key ' || idempotency_digest from calls where idempotency_digest is not null
    union all
    select episode_id, attempt, call_id, 'call ' || call_id from calls
    union all
    select episode_id, attempt, call_id, 'call ' || retry_of from calls where retry_of is not null
),

repeated as (
    select episode_id, attempt, request
    from same
    group by episode_id, attempt, request
    having count(*) > 1
),

rivals as (
    select
        one.episode_id,
        one.attempt,
        one.call_id,
        bool_or(extended.call_id is not null) as is_extended,
        arg_min(other.call_id, {unless: extended.call_id is null, number: calls.number}) as rival_call_id
    from repeated
    inner join same as one using (episode_id, attempt, request)
    inner join same as other using (episode_id, attempt, request)
    inner join calls
        on calls.episode_id = other.episode_id and calls.attempt = other.attempt and calls.call_id = other.call_id
    left join extended
        on
            extended.episode_id = other.episode_id
            and extended.attempt = other.attempt
            and extended.call_id = other.call_id
    where one.call_id <> other.call_id and calls.event = 'call'
    group by one.episode_id, one.attempt, one.call_id
),

judged as (
    select
        calls.*,
        parents.parent_call_id,
        extended.call_id is not null as is_extended,
        rivals.rival_call_id,
        case
            when event = 'intent' then 'unfinished'
            when event = 'failed' then 'failed'
            when not is_current then 'earlier_attempt'
            when not has_whole then 'quarantined'
            when num_sampled = 0 then 'empty'
            when extended.call_id is not null then null
            when rivals.is_extended then 'retry'
            when rivals.call_id is not null then 'unresolved'
        end as reason
    from calls
    left join parents using (episode_id, attempt, call_id)
    left join extended using (episode_id, attempt, call_id)
    left join rivals using (episode_id, attempt, call_id)
),

heirs as (
    select episode_id, attempt, parent_call_id, arg_min(call_id, {unless: not is_extended, number: number}) as call_id
    from judged
    where reason is null and parent_call_id is not null
    group by episode_id, attempt, parent_call_id
),

segments as (
    select judged.episode_id, judged.attempt, judged.call_id, judged.call_id as segment_call_id, 0 as position
    from judged
    anti join heirs using (episode_id, attempt, call_id)
    where reason is null
    union all
    select heirs.episode_id, heirs.attempt, heirs.call_id, segments.segment_call_id, segments.position + 1
    from segments
    inner join heirs
        on
            heirs.episode_id = segments.episode_id
            and heirs.attempt = segments.attempt
            and heirs.parent_call_id = segments.call_id
)

select
    judged.episode_id,
    judged.attempt,
    judged.call_id,
    judged.number,
    judged.parent_call_id,
    judged.is_extended,
    judged.rival_call_id,
    judged.reason,
    segments.segment_call_id,
    segments.position,
    case
        when segments.call_id is not null
            then
                dense_rank() over (
                    partition by judged.episode_id, judged.attempt, segments.call_id is not null order by heads.number
                ) - 1
    end as segment_index
from judged
left join segments using (episode_id, attempt, call_id)
left join judged as heads
    on
        heads.episode_id = judged.episode_id
        and heads.attempt = judged.attempt
        and heads.call_id = segments.segment_call_id
order by judged.episode_id, judged.attempt, judged.number
