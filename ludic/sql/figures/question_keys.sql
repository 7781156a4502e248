-- question_keys: question and answer of each example, by which two sides with other ids are paired
-- grain: one row per env_example_id | reads: evals, eval_episodes
-- question: digest of the messages before the first answer, without system prompts; wanted: NULL in rows without one
select
    env_example_id,
    min(md5(if(len(prompt) = 0, prompt_tokens::varchar, prompt::varchar))) as question,
    min(wanted) as wanted
from (
    select
        env_example_id,
        [
            {'role': message.role, 'content': message.content}
            for message in messages[
                1:coalesce(list_position([message.role for message in messages], 'assistant') - 1, len(messages))
            ]
            if message.role <> 'system'
        ] as prompt,
        prompt_tokens,
        eval_episodes.wanted as wanted
    from evals
    inner join eval_episodes using (rollout_id, env_example_id)
    where sample_index = 0
)
group by env_example_id
