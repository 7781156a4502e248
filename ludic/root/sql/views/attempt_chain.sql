-- attempt_chain: the attempts whose steps led to the current weights: the newest attempt and its parents
-- grain: one row per attempt_id of the chain | reads: attempts
-- NULL: last_step of the newest attempt, from which no attempt has continued
with recursive starts as materialized ( -- else each step of the recursion reads attempts/ again
    select attempt_id, parent_attempt, parent_step
    from attempts
),

chain as (
    select attempt_id, parent_attempt, parent_step, null::bigint as last_step
    from starts
    where attempt_id = (select max(attempt_id) from starts)
    union all
    select
        parent.attempt_id,
        parent.parent_attempt,
        parent.parent_step,
        least(child.parent_step, child.last_step) as last_step
    from chain as child
    inner join starts as parent
        -- a parent is always older; without this condition a damaged file could make a cycle
        on parent.attempt_id = child.parent_attempt and parent.attempt_id < child.attempt_id
)
select attempt_id, coalesce(parent_step, 0) + 1 as first_step, last_step
from chain
