-- token_stats: statistics of each trained token in each gradient step, without superseded steps
-- grain: one row per step and rollout_id | reads: all_token_stats
select * exclude (superseded)
from all_token_stats
where not superseded
