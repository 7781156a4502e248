-- extreme_groups: of each environment the $most best and the $most worst groups by mean reward; of equal ones the newest
-- grain: one row per group_id | reads: groups | best and worst: rank in the environment, from 1
select
    *,
    row_number() over (partition by env_name order by comparable_reward(reward_mean) desc, policy_version desc, group_id) as best,
    row_number() over (partition by env_name order by comparable_reward(reward_mean), policy_version desc, group_id) as worst
from groups
where isfinite(reward_mean)
qualify best <= $most or worst <= $most
order by env_name, best
