-- eval_episodes: episodes of evaluations; each sample once
-- grain: one row per episode_id and agent_id, without sub-agents | reads: evals
-- evaluation: the evaluation that sampled it (view evaluations), or the imported file (imports/import-ID.json); sample_index: from 0 for each example
-- a sample that two processes stored counts once, as the one that was stored first
-- tokens of sub-agents are divided among the agents of the episode; other lengths leave them out
-- NULL: evaluation of rows of other writers; reward of an episode that is not scored; wanted and correct as in rollouts
with own as (
    select
        case
            when regexp_full_match(worker_id, 'eval-[0-9a-f]{16}-.*') then substr(worker_id, 6, 16)
            when regexp_full_match(worker_id, 'import-[0-9a-f]{16}') then substr(worker_id, 8, 16)
        end as evaluation,
        version,
        env,
        env_name,
        env_example_id,
        episode_id,
        agent_id,
        any_value(group_id) as group_id,
        arg_min(rollout_id, segment_index) as rollout_id,
        min(request_index) as request_index,
        min(policy_version) as policy_version,
        min(created_at) as created_at,
        max(model) as model,
        max(temperature) as temperature,
        max(top_p) as top_p,
        max(top_k) as top_k,
        max(max_tokens) as max_tokens,
        max(episode_reward) as reward,
        max(wanted) as wanted,
        bool_or(correct) as correct,
        max(error) as error,
        bool_or(terminated) as terminated,
        bool_or(truncated) as truncated,
        max(truncation_reason) as truncation_reason,
        arg_max(finish_reason, segment_index) as finish_reason,
        bool_or(incomplete_completion) as incomplete_completion,
        bool_or(parse_error) as parse_error,
        sum(num_turns)::bigint as num_turns,
        sum(response_length)::bigint as response_length,
        sum(prompt_length)::bigint as num_prompt_tokens,
        sum(action_length)::bigint as num_sampled_tokens
    from evals
    where depth = 0
    group by all
),

handed_on as (
    select
        version,
        env,
        episode_id,
        sum(prompt_length)::bigint as num_prompt_tokens,
        sum(action_length)::bigint as num_sampled_tokens
    from evals
    where depth > 0
    group by all
),

samples as (
    from own
    qualify row_number() over (
        partition by version, env, evaluation, agent_id, if(evaluation is null, episode_id, request_index::varchar)
        order by created_at, episode_id
    ) = 1
)

select
    samples.* replace (
        samples.num_prompt_tokens
        + coalesce(handed_on.num_prompt_tokens, 0) / count(*) over (partition by version, env, episode_id)
            as num_prompt_tokens,
        samples.num_sampled_tokens
        + coalesce(handed_on.num_sampled_tokens, 0) / count(*) over (partition by version, env, episode_id)
            as num_sampled_tokens
    ),
    row_number() over (
        partition by version, env, evaluation, env_example_id, agent_id
        order by request_index, created_at, episode_id
    ) - 1 as sample_index
from samples
left join handed_on using (version, env, episode_id)
