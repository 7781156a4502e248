-- bias_by_length: fate of answers by their number of sampled tokens, to see whether training misses long ones
-- grain: one row per power of two of sampled tokens | reads: request_episodes
-- num_too_old: dropped by max_off_policy_steps, or too old when they came; share_used: of those that do not wait
-- lost and given-up answers have no length: see outcome of requests
-- NULL: share_used while all of them wait
select
    if(num_tokens > 0, 2 ** floor(log2(num_tokens)), 0)::bigint as min_tokens,
    count(*) as num_episodes,
    count(*) filter (outcome = 'failed') as num_failed,
    count(*) filter (fate = 'used') as num_used,
    count(*) filter (fate = 'max_off_policy_steps') as num_too_old,
    count(*) filter (fate not in ('used', 'max_off_policy_steps', 'waiting')) as num_dropped,
    count(*) filter (fate = 'waiting') as num_waiting,
    count(*) filter (fate = 'used') / nullif(count(*) filter (fate != 'waiting'), 0) as share_used,
    avg(sampled_s) as sampled_s_mean
from request_episodes
where num_tokens is not null and fate is not null
group by min_tokens
order by min_tokens
