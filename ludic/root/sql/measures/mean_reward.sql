-- mean_reward: mean reward of an episode
-- grain: one row per episode | reads: eval_episodes | NULL: an episode that is not scored, which is left out
-- unscored: reward of an episode that is not scored, such as 0 to count it as a failure
-- default: unscored = null
select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    coalesce(reward, $unscored::double) as value
from eval_episodes
