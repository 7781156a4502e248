-- inspect_samples: samples of evaluations under the column names of inspect_ai's samples_df and evals_df
-- grain: one row per sample | reads: eval_episodes, evals
-- id, epoch: the example, and its sample from 1; task_name: the environment; score_reward: the reward
-- NULL: score_reward of a sample that is not scored; error of one that did not fail; target if it is not known
select
    sample.env_name as task_name,
    sample.model || '@' || sample.policy_version as model,
    sample.policy_version as task_arg_policy_version,
    sample.evaluation as task_arg_evaluation,
    sample.env_example_id as id,
    sample.sample_index + 1 as epoch,
    coalesce(sample.wanted, first.metadata['target'], '') as target,
    sample.reward as score_reward,
    first.reward_components as score_components,
    (sample.num_prompt_tokens + sample.num_sampled_tokens)::bigint as total_tokens,
    sample.num_turns as turn_count,
    sample.error,
    sample.rollout_id as metadata_rollout_id,
    sample.episode_id as metadata_episode_id,
    sample.agent_id as metadata_agent_id
from eval_episodes as sample
inner join evals as first using (version, env, rollout_id)
