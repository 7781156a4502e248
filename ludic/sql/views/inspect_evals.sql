-- inspect_evals: evaluations under the column names of inspect_ai's evals_df
-- grain: one row per evaluation, version and environment | reads: inspect_samples
-- NULL: score_reward_mean if no sample is scored, which leaves the unscored ones out
select
    task_name,
    model,
    task_arg_policy_version,
    task_arg_evaluation,
    max(epoch) as epochs,
    count(distinct id) as dataset_samples,
    count(*) as total_samples,
    count(*) filter (error is null) as completed_samples,
    avg(score_reward) as score_reward_mean
from inspect_samples
group by all
