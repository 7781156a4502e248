-- unscored: share of episodes without a reward, because something failed
-- grain: one row per episode | reads: eval_episodes
select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    (reward is null)::double as value
from eval_episodes
