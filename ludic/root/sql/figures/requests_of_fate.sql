-- requests_of_fate: groups with $outcome and $fate, newest first
-- grain: one row per group_id, at most $most after the first $skip | reads: requests
-- NULL: as in requests
select
    group_id, group_number, outcome, fate, worker_id, env_name, env_example_id, group_size, policy_version, started_at,
    sampled_s, num_ended, num_failed, num_tokens, used_step, off_policy_steps, next_group_id
from requests
where outcome = $outcome and fate is not distinct from $fate
order by coalesce(started_at, ended_at) desc, group_id
limit $most offset $skip
