-- num_turns: completions of the model in an episode
-- grain: one row per episode | reads: eval_episodes
select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    num_turns::double as value,
    null as num_trials -- a count, never a share
from eval_episodes
