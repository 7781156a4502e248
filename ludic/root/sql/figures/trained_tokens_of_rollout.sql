-- trained_tokens_of_rollout: lists per response token of the first use of rollout $id
-- grain: at most one row | reads: batches, token_stats | NULL: trainer_logprobs without token statistics
select trainer_logprobs, token_advantages
from batches
left join token_stats using (attempt_id, step, rollout_id)
where batches.rollout_id = $id
order by step
limit 1
