-- not_finite: a reward, a logprob or a temperature that is NaN or infinite
-- grain: one row per such rollout_id | reads: rollouts
select
    rollout_id,
    episode_reward,
    temperature,
    len(list_filter(token_rewards, lambda value: not isfinite(value))) as num_token_rewards,
    len(list_filter(response_logprobs, lambda value: not isfinite(value))) as num_response_logprobs,
    len(list_filter(map_values(reward_components), lambda value: not isfinite(value))) as num_reward_components
from rollouts
where
    not isfinite(episode_reward)
    or not isfinite(temperature)
    or num_token_rewards > 0
    or num_response_logprobs > 0
    or num_reward_components > 0
