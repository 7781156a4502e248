-- all_batches: the ledgers of all attempts: each rollout that a gradient step considered
-- grain: one row per attempt_id, step and rollout_id | reads: batches/ of the root, attempt_chain
-- off_policy_steps: trainer_version - policy_version; off_policy_steps_last: trainer_version - policy_version_last, NULL
-- before batches 1.5; files call them lag and lag_last
-- superseded: true for steps off the chain, after the step from which a later attempt continued
-- NULL: as in schemas/batches.v1.json
with ledger as (
    from $stored
)
select
    ledger.* rename (lag as off_policy_steps, lag_last as off_policy_steps_last),
    attempt_chain.attempt_id is null as superseded
from ledger
left join attempt_chain
    on ledger.attempt_id = attempt_chain.attempt_id
    and ledger.step >= attempt_chain.first_step
    and ledger.step <= coalesce(attempt_chain.last_step, ledger.step)
