-- rollouts: what all rollouts are together
-- grain: one row | reads: rollouts | NULL: a mean or a time without rollouts
select
    count(*) as num_rollouts,
    count(distinct group_id) as num_groups,
    count(distinct episode_id) as num_episodes,
    count(*) filter (error is not null) as num_errors,
    count(*) filter (capture in ('ids', 'text')) as num_without_logprobs,
    count(*) filter (capture = 'text') as num_from_text,
    sum(prompt_length)::bigint as num_prompt_tokens,
    sum(response_length)::bigint as num_response_tokens,
    avg(episode_reward) as reward_mean,
    min(created_at) as first_created_at,
    max(created_at) as last_created_at
from rollouts
