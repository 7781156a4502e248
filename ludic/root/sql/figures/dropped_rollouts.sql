-- dropped_rollouts: rollouts that gradient steps dropped for $reason, newest steps first
-- grain: one row per step and rollout_id, at most $most after the first $skip | reads: batches
select
    step, rollout_id, group_id, env_name, policy_version, off_policy_steps, episode_reward, advantage, response_length,
    truncation_reason
from batches
where not used and reason = $reason
order by step desc, batch_index
limit $most offset $skip
