-- answers_nearest_mean: of each of $examples, the sample whose reward is nearest to the mean of its samples
-- grain: one row per env_example_id | reads: eval_episodes
-- $version, $env, $evaluation: of the samples; '' stands for those that `ludic eval` did not sample
with samples as (
    select
        rollout_id, env_example_id, version, reward, wanted, correct, error, sample_index,
        avg(reward) over (partition by env_example_id) as reward_mean,
        count(*) over (partition by env_example_id) as num_samples
    from eval_episodes
    where
        version = $version and env_name = $env and coalesce(evaluation, '') = $evaluation
        and env_example_id in (select unnest($examples::varchar[]))
)
from samples
qualify row_number() over (
    partition by env_example_id order by comparable_reward(abs(reward - reward_mean)) nulls last, sample_index, rollout_id
) = 1
