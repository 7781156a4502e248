-- all_token_stats: statistics of each token in the gradient steps of all attempts, if the trainer stored them
-- grain: one row per attempt_id, step and rollout_id | reads: token_stats/ of the root, attempt_chain
-- superseded: true for steps off the chain, after the step from which a later attempt continued
with kept as (
    from $stored
)
select
    kept.*,
    attempt_chain.attempt_id is null as superseded
from kept
left join attempt_chain
    on kept.attempt_id = attempt_chain.attempt_id
    and kept.step >= attempt_chain.first_step
    and kept.step <= coalesce(attempt_chain.last_step, kept.step)
