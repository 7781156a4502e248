-- contradictory_batches: a ledger row that contradicts itself: used and dropped, or neither; used without a finite
-- advantage; dropped with a weight; or with wrong off_policy_steps
-- grain: one row per attempt_id, step and rollout_id | reads: all_batches, attempts
-- a trainer that was recorded need not say its advantages
select attempt_id, step, rollout_id, used, reason, advantage, weight, off_policy_steps, off_policy_steps_last, trainer_version, policy_version
from all_batches
left join attempts using (attempt_id)
where
    used <> (reason is null)
    or (used and not coalesce(isfinite(advantage), (attempts.config -> 'recorded') is not null))
    or (not used and weight <> 0)
    or off_policy_steps <> trainer_version - policy_version
    or off_policy_steps_last > off_policy_steps
