-- counts_of_samples: examples, samples, failures and tokens of stored samples
-- grain: one row per evaluation, version and environment | reads: eval_episodes
select
    evaluation,
    policy_version,
    env_name,
    count(distinct env_example_id) as num_examples,
    count(*) as num_samples,
    count(*) filter (reward is null) as num_unscored,
    count(*) filter (error is not null) as num_failed,
    sum(num_prompt_tokens)::bigint as num_prompt_tokens,
    sum(num_sampled_tokens)::bigint as num_sampled_tokens
from eval_episodes
group by all
order by policy_version, env_name, evaluation
