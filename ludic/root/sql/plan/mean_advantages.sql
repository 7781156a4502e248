-- mean_advantages: one advantage for each row that has one per token: their mean
-- grain: one row per rollout_id | reads: estimated_tokens
-- NULL: for a row without a list
select rollout_id, case when len(token_advantages) = 0 then 0 else list_avg(token_advantages) end as advantage
from estimated_tokens
