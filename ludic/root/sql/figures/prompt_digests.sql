-- prompt_digests: digest of the prompt of each example, by which two sides are compared
-- grain: one row per env_example_id | reads: evals, eval_episodes
select
    env_example_id,
    min(md5(if(len(prompt) = 0, prompt_tokens::varchar, prompt::varchar))) as digest
from (
    select
        env_example_id,
        messages[1:coalesce(list_position([message.role for message in messages], 'assistant') - 1, len(messages))]
            as prompt,
        prompt_tokens
    from evals
    inner join eval_episodes using (rollout_id, env_example_id)
    where sample_index = 0
)
group by env_example_id
