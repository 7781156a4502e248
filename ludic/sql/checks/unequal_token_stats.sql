-- unequal_token_stats: lists of a step's tokens that are not as long as the row says, or longer than the response
select
    kept.attempt_id,
    kept.step,
    kept.rollout_id
from all_token_stats as kept
left join all_batches as ledger using (attempt_id, step, rollout_id)
where
    len(kept.trainer_logprobs) <> kept.response_length
    or len(kept.entropy) <> kept.response_length
    or len(kept.clipped) <> kept.response_length
    or len(kept.weight) <> kept.response_length
    or kept.response_length > ledger.response_length
    or not coalesce(ledger.used, false)
