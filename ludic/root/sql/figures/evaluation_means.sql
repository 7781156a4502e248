-- evaluation_means: means over the examples of each evaluation of $versions
-- grain: one row per version, env_name and evaluation | reads: eval_episodes, evaluations
-- an example counts once, with the mean of its samples, of its reward the scored ones
-- is_first: whether no other evaluation of the environment was begun before it
-- NULL: evaluation of rows of other writers; reward_mean if no sample is scored; accuracy if of none it is known
with first_of as (
    select env_name, arg_min(evaluation, created_at) as first_evaluation
    from evaluations
    group by env_name
),

examples as (
    select
        version,
        env_name,
        evaluation,
        max(created_at) as newest,
        count(*) as num_samples,
        avg(reward) as reward,
        avg(correct::integer) as correct,
        avg(response_length) as response_length,
        avg(truncated::integer) as truncated,
        avg((error is not null)::integer) as error
    from eval_episodes
    where list_contains($versions::bigint[], version)
    group by version, env_name, evaluation, env_example_id
)

select
    version,
    env_name,
    evaluation,
    coalesce(evaluation = any_value(first_evaluation), evaluation is null) as is_first,
    max(newest) as newest,
    sum(num_samples)::bigint as num_samples,
    avg(reward) as reward_mean,
    avg(correct) as accuracy,
    avg(response_length) as response_length_mean,
    avg(truncated) as truncated_fraction,
    avg(error) as error_fraction
from examples
left join first_of using (env_name)
group by version, env_name, evaluation
order by version, env_name, evaluation
