-- avg_at_k: mean reward of the first k episodes of an example
-- grain: one row per example and agent | reads: eval_episodes | NULL: an example with fewer than k episodes, or with
-- one among the first k that is not scored
-- default: k = 1
-- default: unscored = null
select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    if(count(coalesce(reward, $unscored::double)) = $k, avg(coalesce(reward, $unscored::double)), null) as value,
    -- of rewards 0 and 1 it is a share
    if(bool_and(comparable_reward(coalesce(reward, $unscored::double)) in (0, 1)), count(*), null) as num_trials
from eval_episodes
where sample_index < $k
group by evaluation, policy_version, env_name, env_example_id, agent_id
