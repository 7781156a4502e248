-- evaluation_means: means of the samples of each evaluation of $versions
-- grain: one row per version, env_name and evaluation | reads: eval_episodes, evaluations
-- is_first: whether no other evaluation of the environment was begun before it
-- NULL: evaluation of rows of other writers; reward_mean if no sample is scored; accuracy if of none it is known
with first_of as (
    select env_name, arg_min(evaluation, created_at) as first_evaluation
    from evaluations
    group by env_name
)

select
    version,
    env_name,
    evaluation,
    coalesce(evaluation = first_evaluation, evaluation is null) as is_first,
    max(created_at) as newest,
    count(*) as num_samples,
    avg(reward) as reward_mean,
    avg(correct::integer) as accuracy,
    avg(response_length) as response_length_mean,
    avg(truncated::integer) as truncated_fraction,
    avg((error is not null)::integer) as error_fraction
from eval_episodes
left join first_of using (env_name)
where list_contains($versions::bigint[], version)
group by all
order by version, env_name, evaluation
