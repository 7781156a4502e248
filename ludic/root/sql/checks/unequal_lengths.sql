-- unequal_lengths: a row whose lists differ in length from its counts
-- grain: one row per such rollout_id | reads: rollouts
select
    rollout_id,
    prompt_length,
    len(prompt_tokens) as num_prompt_tokens,
    response_length,
    len(response_tokens) as num_response_tokens,
    len(response_logprobs) as num_response_logprobs,
    len(token_rewards) as num_token_rewards,
    len(action_mask) as num_action_mask,
    action_length,
    coalesce(len(list_filter(action_mask, lambda action: action)), len(response_tokens)) as num_actions
from rollouts
where
    num_prompt_tokens <> prompt_length
    or num_response_tokens <> response_length
    or num_response_logprobs <> response_length
    or num_token_rewards <> response_length
    or num_action_mask <> response_length
    or num_actions <> action_length
