-- progress: tokens that each gradient step trained on, without steps that a later attempt has replaced
-- grain: one row per step | reads: batches, metrics, attempt_chain
-- num_tokens: tokens through the model; where the trainer did not count them, prompts and responses of the used rollouts
with planned as (
    select step, coalesce(sum(prompt_length + response_length) filter (used), 0)::bigint as num_tokens
    from batches
    group by step
),

counted as (
    select metrics.step, max(num_tokens) as num_tokens
    from metrics
    inner join attempt_chain on
        metrics.attempt_id = attempt_chain.attempt_id
        and metrics.step >= attempt_chain.first_step
        and metrics.step <= coalesce(attempt_chain.last_step, metrics.step)
    where kind = 'train'
    group by metrics.step
)

select step, coalesce(counted.num_tokens, planned.num_tokens) as num_tokens
from planned
left join counted using (step)
order by step
