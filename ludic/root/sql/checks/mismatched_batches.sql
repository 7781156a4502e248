-- mismatched_batches: a ledger row whose group_id or policy_version differs from its rollout's
-- grain: one row per attempt_id, step and rollout_id | reads: all_batches, rollouts
select
    ledger.attempt_id,
    ledger.step,
    rollout_id,
    ledger.group_id,
    rollouts.group_id as stored_group_id,
    ledger.policy_version,
    rollouts.policy_version as stored_policy_version
from all_batches as ledger
inner join rollouts using (rollout_id)
where ledger.group_id <> rollouts.group_id or ledger.policy_version <> rollouts.policy_version
