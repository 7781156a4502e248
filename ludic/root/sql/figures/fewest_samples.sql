-- fewest_samples: the number of samples of the example that has the fewest
-- grain: one row | reads: eval_episodes
select min(num_samples) as num_samples
from (
    select count(*) as num_samples
    from eval_episodes
    group by version, env, evaluation, env_example_id, agent_id
)
