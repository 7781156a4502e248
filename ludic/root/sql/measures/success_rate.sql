-- success_rate: share of episodes that succeed
-- $threshold: reward of a success; NULL: the answer is correct, where that is known, else the reward is 1 (is_success)
-- grain: one row per episode | reads: eval_episodes | NULL: an episode that is not scored, which is left out
-- unscored: reward of an episode that is not scored, such as 0 to count it as a failure
-- default: threshold = null
-- default: unscored = null
select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    coalesce(
        is_success(reward, correct, $threshold::double), is_success($unscored::double, null, $threshold::double)
    )::double as value
from eval_episodes
