-- inspect_evals: evaluations under the column names of inspect_ai's evals_df
-- grain: one row per evaluation, version and environment | reads: inspect_samples
-- score_reward_mean: each example counts once, with the mean of its scored samples
-- NULL: score_reward_mean if no sample is scored
with examples as (
    select
        task_name,
        model,
        task_arg_policy_version,
        task_arg_evaluation,
        max(epoch) as epochs,
        count(*) as num_samples,
        count(*) filter (error is null) as num_completed,
        avg(score_reward) as score_reward
    from inspect_samples
    group by task_name, model, task_arg_policy_version, task_arg_evaluation, id
)

select
    task_name,
    model,
    task_arg_policy_version,
    task_arg_evaluation,
    max(epochs) as epochs,
    count(*) as dataset_samples,
    sum(num_samples)::bigint as total_samples,
    sum(num_completed)::bigint as completed_samples,
    avg(score_reward) as score_reward_mean
from examples
group by task_name, model, task_arg_policy_version, task_arg_evaluation
