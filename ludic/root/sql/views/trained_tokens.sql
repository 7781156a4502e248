-- trained_tokens: sampled tokens of each gradient step, with the logprobs of sampler and trainer, in nats
-- grain: one row per step, rollout_id and position | reads: token_stats, batches, rollouts
-- off_policy_steps: trainer_version minus the version of the weights that sampled this token
-- log_ratio: trainer's minus sampler's logprob, within 20 nats, as in the trainer
-- only tokens of rollouts in this root, in steps with token_stats; not those whose sampler's logprobs nobody kept
with tokens as (
    select
        token_stats.step,
        rollout_id,
        batches.trainer_version,
        rollouts.policy_version,
        weight_versions,
        engine,
        temperature,
        top_p,
        top_k,
        unnest(range(token_stats.response_length)) as position,
        unnest(trainer_logprobs) as trainer_logprob,
        unnest(response_logprobs[:token_stats.response_length]) as sampler_logprob,
        unnest(coalesce(action_mask, [true for _ in response_logprobs])[:token_stats.response_length]) as is_sampled
    from token_stats
    inner join batches using (step, rollout_id)
    inner join rollouts using (rollout_id)
    where coalesce(capture, 'sampler') not in ('ids', 'text')
)

select
    step,
    rollout_id,
    position,
    trainer_version - coalesce(
        list_filter(weight_versions, lambda span: span.start <= position and position < span.end)[1].version,
        policy_version
    ) as off_policy_steps,
    engine,
    concat_ws(
        ', ', 'temperature ' || temperature, if(top_p < 1, 'top_p ' || top_p, null), 'top_k ' || top_k
    ) as sampling,
    sampler_logprob,
    trainer_logprob,
    greatest(-20, least(20, trainer_logprob - sampler_logprob)) as log_ratio
from tokens
where is_sampled
