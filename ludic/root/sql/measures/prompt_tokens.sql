-- prompt_tokens: tokens of an episode's prompts, tasks that were handed on included
-- grain: one row per episode | reads: eval_episodes
select
    evaluation,
    policy_version,
    env_name,
    env_example_id,
    num_prompt_tokens::double as value,
    null as num_trials -- a count, never a share
from eval_episodes
