-- unequal_token_stats: token statistics whose lists differ in length from response_length, that are longer than the
-- response, or whose rollout the ledger does not use in that step
-- grain: one row per attempt_id, step and rollout_id | reads: all_token_stats, all_batches
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
