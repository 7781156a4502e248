-- contradictory_batches: a ledger row that contradicts itself: used and dropped, or neither; used without a finite
-- advantage; dropped with a weight; or with a wrong lag
-- grain: one row per attempt_id, step and rollout_id | reads: all_batches
select attempt_id, step, rollout_id, used, reason, advantage, weight, lag, lag_last, trainer_version, policy_version
from all_batches
where
    used <> (reason is null)
    or (used and not coalesce(isfinite(advantage), false))
    or (not used and weight <> 0)
    or lag <> trainer_version - policy_version
    or lag_last > lag
