-- token_stats: what each gradient step of the run as it stands saw of each token that it trained on
-- grain: one row per step and rollout_id | reads: all_token_stats
select * exclude (superseded)
from all_token_stats
where not superseded
