-- rivals: answered calls that repeat each other: with one idempotency key, or that repeat one call, or of which one
-- repeats the other (retry_of)
-- grain: one row per scope and call_id with a rival | reads: answers
-- answers: one row per answered call; calls of different scopes are no rivals; goes_on: true if the agent went on with it
-- any_goes_on: true if the agent went on with the call or one of its rivals
-- Equal requests alone are no rivals: an agent may ask for several answers. The gateway knows whether a client may have
-- lost an answer, and names that call
with requests as (
    select
        scope,
        call_id,
        goes_on,
        unnest(['key ' || idempotency_digest, 'call ' || call_id, 'call ' || retry_of]) as request
    from answers
),

repeated as (
    select
        scope,
        call_id,
        count(*) over same_request > 1 as is_repeated,
        bool_or(goes_on) over same_request as any_goes_on
    from requests
    where request is not null
    window same_request as (partition by scope, request)
)

select scope, call_id, bool_or(any_goes_on) as any_goes_on
from repeated
group by scope, call_id
having bool_or(is_repeated)
