-- untrainable_tokens: a row with a token id that the model does not know, or a logprob that is no logarithm of a probability;
-- training drops it as untrainable
-- grain: one row per such rollout_id | reads: rollouts | the variable vocab_size: rows of the model's embedding, if known
-- the bounds of logprobs are those of ludic.records.validation; not_finite and unsound_arrays find the others
select
    rollout_id,
    list_min(prompt_tokens) as lowest_prompt_token,
    list_max(prompt_tokens) as highest_prompt_token,
    list_min(response_tokens) as lowest_response_token,
    list_max(response_tokens) as highest_response_token,
    list_min(response_logprobs) as lowest_logprob,
    list_max(response_logprobs) as highest_logprob
from rollouts
where
    least(lowest_prompt_token, lowest_response_token) < 0
    or greatest(highest_prompt_token, highest_response_token) >= coalesce(getvariable('vocab_size')::bigint, 2147483648)
    or (isfinite(lowest_logprob) and lowest_logprob < -100)
    or (isfinite(highest_logprob) and highest_logprob > 1e-5)
