-- ends: share of episodes by the way they ended
-- failed: an environment or a tool failed; truncated, with the reason: a limit ended it; terminated: the environment
-- did; unfinished: nothing of these
-- grain: one row per episode and part | reads: eval_episodes
with ended as (
    select
        *,
        case
            when error is not null then 'failed'
            when truncated then 'truncated: ' || ended_by(coalesce(truncation_reason, 'no reason'), finish_reason, parse_error)
            when terminated then 'terminated'
            else 'unfinished'
        end as end_
    from eval_episodes
),

parts as (
    select distinct evaluation, policy_version, env_name, end_ as part from ended
)

select
    ended.evaluation,
    ended.policy_version,
    ended.env_name,
    ended.env_example_id,
    parts.part,
    (ended.end_ = parts.part)::double as value
from ended
inner join parts
    on
        parts.evaluation is not distinct from ended.evaluation
        and parts.policy_version = ended.policy_version
        and parts.env_name = ended.env_name
