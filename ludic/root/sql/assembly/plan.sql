-- plan: where the completion of each call belongs: its parent, its segment, and whether it is trained on, or why not
-- grain: one row per number | reads: calls, prefixes
-- calls: one row per call: its answer, else its failure, else its intent; numbered in the order in which they began
-- continues: call_id of the call whose messages and answer begin this call's messages; its tokens may begin no prompt
-- where a server tokenizes each conversation, or a template drops thinking
-- scope: an attempt at an episode; calls of different scopes have nothing to do with each other
-- is_current: false for calls of an attempt that another one replaced; has_whole: false for a call whose prompt is not
-- known, since a call that it extends is missing; num_sampled: delivered tokens
-- prefixes: digest of the first `length` units of a call's prompt, and with is_whole of its prompt and completion; the
-- unit is a token, or a message of a call without token ids
-- parent: the earlier call whose prompt and completion are the longest beginning of this prompt; of equal ones the first
-- rivals: see rivals.sql; those that a later call extends, or continues, count; if none does, none counts (unresolved)
-- segment: number of the first call of the segment; of the children of a call one goes on with its segment, the first
-- that was extended, else the first; each other child begins a segment
-- NULL: parent of a call that extends none; segment of a call that is not trained on; reason of one that is
with recursive parents as (
    select mine.number, arg_max(theirs.number, {length: theirs.length, earliest: -theirs.number}) as parent
    from prefixes as mine
    inner join prefixes as theirs
        on
            mine.scope = theirs.scope
            and mine.unit = theirs.unit
            and mine.length = theirs.length
            and mine.digest = theirs.digest
            and mine.number > theirs.number
    where not mine.is_whole and theirs.is_whole
    group by mine.number
),

linked as (
    select
        calls.*,
        parents.parent,
        children.number is not null
        or continued.call_id is not null as is_extended
    from calls
    left join parents using (number)
    left join (select distinct parent as number from parents) as children using (number)
    left join
        (select distinct scope, continues as call_id from calls where event = 'call') as continued
        using (scope, call_id)
),

answers as (
    select scope, call_id, idempotency_digest, retry_of, is_extended as goes_on
    from linked
    where event = 'call'
),

rivals as ($rivals),

judged as (
    select
        linked.number,
        parent,
        is_extended,
        case
            when event = 'intent' then 'unfinished'
            when event = 'failed' then 'failed'
            when not is_current then 'earlier_attempt'
            when not has_whole then 'quarantined'
            when num_sampled = 0 then 'empty'
            when is_extended then null
            when any_goes_on then 'retry'
            when not any_goes_on then 'unresolved'
        end as reason
    from linked
    left join rivals using (scope, call_id)
),

heirs as (
    select parent, arg_min(number, {unless: not is_extended, number: number}) as number
    from judged
    where reason is null and parent is not null
    group by parent
),

segments as (
    select number, number as segment
    from judged
    anti join heirs using (number)
    where reason is null
    union all
    select heirs.number, segments.segment
    from segments
    inner join heirs on heirs.parent = segments.number
)

select judged.number, parent, segment, is_extended, reason
from judged
left join segments using (number)
order by judged.number
