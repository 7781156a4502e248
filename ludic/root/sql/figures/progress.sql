-- progress: what each gradient step trained on and how long it took, without steps that a later attempt has replaced
-- grain: one row per step | reads: batches, metrics, attempt_chain
-- num_tokens: tokens after the prompts of the rollouts that the step used
-- seconds: waiting, the step, publishing and its checkpoint; NULL if the trainer did not measure them
with trained as (
    select step, coalesce(sum(response_length) filter (used), 0)::bigint as num_tokens
    from batches
    group by step
),

timed as (
    select
        metrics.step,
        max(step_s + coalesce(wait_s, 0) + coalesce(publish_s, 0) + coalesce(checkpoint_s, 0)) as seconds
    from metrics
    inner join attempt_chain on
        metrics.attempt_id = attempt_chain.attempt_id
        and metrics.step >= attempt_chain.first_step
        and metrics.step <= coalesce(attempt_chain.last_step, metrics.step)
    where kind = 'train'
    group by metrics.step
)

select trained.*, timed.seconds
from trained
left join timed using (step)
order by step
