-- requests_by_fate: groups that workers started, by how they ended and what the trainer did with them
-- grain: one row per outcome and fate | reads: requests | NULL: fate of groups that are not complete
-- sampled_s_mean: seconds from start to end, of groups whose end is known
select
    outcome,
    fate,
    count(*) as num_groups,
    sum(num_ended)::bigint as num_episodes,
    sum(num_failed)::bigint as num_failed,
    sum(num_tokens)::bigint as num_tokens,
    avg(sampled_s) as sampled_s_mean,
    avg(off_policy_steps) as off_policy_steps_mean
from requests
group by outcome, fate
order by num_groups desc, outcome, fate
