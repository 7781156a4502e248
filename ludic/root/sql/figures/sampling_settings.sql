-- sampling_settings: settings with which samples were sampled
-- grain: one row per combination | reads: eval_episodes
select distinct temperature, top_p, top_k, max_tokens
from eval_episodes
order by all
