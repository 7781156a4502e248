-- unclaimed_calls: model calls of a gateway that never had their episode
-- grain: one row per episode_id, attempt and worker_id | reads: calls, episode_claims
-- imported calls have no claim
select calls.episode_id, calls.attempt, calls.worker_id, count(distinct calls.call_id) as num_calls
from calls
anti join episode_claims using (episode_id, attempt, worker_id)
where not starts_with(calls.worker_id, 'import-')
group by all
order by all
