-- response_length: tokens of an episode after its first prompt, those of tools and environment included
-- grain: one row per episode | reads: eval_episodes
select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    response_length::double as value,
    null as num_trials -- a count, never a share
from eval_episodes
