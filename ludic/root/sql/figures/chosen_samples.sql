-- chosen_samples: stored samples of $versions, $envs and $evaluations; NULL chooses all
-- grain: one row per episode of an agent | reads: eval_episodes
-- '' among $evaluations: samples that were neither sampled by `ludic eval` nor imported
select *
from main.eval_episodes
where
    ($versions is null or version in (select unnest($versions::bigint[])))
    and ($envs is null or env in (select unnest($envs::varchar[])))
    and ($evaluations is null or coalesce(evaluation, '') in (select unnest($evaluations::varchar[])))
