-- lost_calls: model calls that others of their episode extend, and that are not stored
-- grain: one row per episode_id, attempt and missing call_id | reads: calls
with bases as (
    select episode_id, attempt, base_call_id as call_id
    from calls
    where base_call_id is not null
    union
    select episode_id, attempt, base_messages_call_id as call_id
    from calls
    where base_messages_call_id is not null
),

answered as (
    select episode_id, attempt, call_id
    from calls
    where event = 'call'
)

select episode_id, attempt, call_id
from bases
anti join answered using (episode_id, attempt, call_id)
order by all
