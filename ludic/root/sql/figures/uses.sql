-- uses: uses of the rollouts $ids in training, superseded ones last
-- grain: one row per attempt, step and rollout | reads: all_batches
select attempt_id, step, used, reason, advantage, weight, off_policy_steps, superseded, rollout_id
from all_batches
where list_contains($ids, rollout_id)
order by superseded, attempt_id, step
