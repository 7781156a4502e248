-- accuracy: share of episodes whose answer is correct
-- grain: one row per episode | reads: eval_episodes | NULL: an episode of which that is not known, which is left out
-- unscored: value of an episode that is not scored, such as 0 to count it as wrong
-- default: unscored = null
select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    if(reward is null, $unscored::double, correct::double) as value
from eval_episodes
