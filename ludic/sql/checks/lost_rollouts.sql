-- lost_rollouts: a row of the ledger whose rollout is in no file
-- grain: one row per attempt_id, step and rollout_id | reads: all_batches, rollouts
-- versions before the oldest that is stored are not missed: they may have expired
select attempt_id, step, rollout_id, policy_version, file
from all_batches
anti join rollouts using (rollout_id)
where policy_version >= (select min(version) from rollouts)
