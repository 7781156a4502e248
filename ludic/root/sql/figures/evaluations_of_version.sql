-- evaluations_of_version: evaluations of version $version, the newest first
-- grain: one row per environment and evaluation | reads: eval_episodes
select env_name, evaluation, max(created_at) as newest
from eval_episodes
where version = $version
group by all
order by newest desc, evaluation
