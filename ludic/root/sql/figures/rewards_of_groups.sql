-- rewards_of_groups: the mean reward of each group that the steps $first_step to $last_step considered, used or dropped
-- grain: one row per group_id with a scored rollout | reads: batches | $envs: NULL for all environments
select group_id, avg(episode_reward) as reward
from batches
where
    step between $first_step and $last_step
    and isfinite(episode_reward)
    and ($envs is null or list_contains($envs, env_name))
group by group_id
order by group_id
