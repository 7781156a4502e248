-- steps: metrics of gradient steps that a report plots, without steps that a later attempt has replaced
-- grain: one row per step | reads: metrics, attempt_chain
-- sampled_tokens_per_s: tokens that workers sampled since the step before; NULL for the first step, and if no worker
-- has metrics
-- memory_gb: 1 GB is 1e9 bytes
-- NULL: a metric that the step did not measure
with measured as materialized ( -- of many small files, which are read once
    select
        kind, attempt_id, step, created_at, num_tokens,
        reward_mean, response_length_mean, entropy, reference_kl, sampler_kl, sampler_kl_k1, ratio_p01,
        ratio_mean, ratio_p99, clip_fraction, off_policy_steps_mean, off_policy_steps_max, tokens_per_s,
        step_s, wait_s, loss, grad_norm, expert_imbalance, memory_bytes / 1e9 as memory_gb
    from metrics
),

steps as (
    select measured.*, created_at - lag(created_at) over (order by step) as since
    from measured
    inner join attempt_chain using (attempt_id)
    where kind = 'train' and step >= first_step and step <= coalesce(last_step, step)
),

sampled as (
    select steps.step, sum(calls.num_tokens) as num_tokens
    from (from measured where kind = 'worker') as calls
    asof join steps on calls.created_at <= steps.created_at
    group by steps.step
)

select
    steps.* exclude (kind, attempt_id, created_at, num_tokens, since),
    if(has_workers, coalesce(sampled.num_tokens, 0), null) / nullif(epoch(since), 0) as sampled_tokens_per_s
from steps
left join sampled using (step)
cross join (select count(*) > 0 as has_workers from measured where kind = 'worker')
order by step
