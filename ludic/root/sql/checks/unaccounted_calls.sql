-- unaccounted_calls: an agent's call whose sampled tokens are in several rows, in a row with another number of tokens, or in
-- none without a reason
-- grain: one row per such call_id and fate | reads: call_audit, model_calls
select audit.episode_id, audit.attempt, audit.call_id, audit.why, audit.num_tokens, audit.num_rows, audit.rollout_id
from call_audit as audit
inner join model_calls using (call_id)
where
    audit.why = 'unexplained'
    or audit.num_rows > 1
    or (audit.fate = 'trained' and audit.num_tokens <> coalesce(len(model_calls.response_tokens), audit.num_tokens))
