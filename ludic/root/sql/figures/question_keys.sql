-- question_keys: question and answer of each example, by which two sides with other ids are paired
-- grain: one row per env_example_id | reads: evals, eval_episodes
-- question: digest of the messages before the first answer, without system prompts, of the first sample that has any,
-- NULL if all samples failed before their first prompt: such rows have one made-up token, no messages, no response
-- wanted: NULL in rows without one
select
    env_example_id,
    (min({'sample_index': sample_index, 'question': question}) filter (where question is not null)).question
        as question,
    min(wanted) as wanted
from (
    select
        env_example_id,
        sample_index,
        wanted,
        case
            when len(prompt) > 0 then md5(prompt::varchar)
            when num_messages > 0 or response_length > 0 then md5(prompt_tokens::varchar)
        end as question
    from (
        select
            env_example_id,
            sample_index,
            [
                {'role': message.role, 'content': message.content}
                for message in messages[
                    1:coalesce(list_position([message.role for message in messages], 'assistant') - 1, len(messages))
                ]
                if message.role <> 'system'
            ] as prompt,
            len(messages) as num_messages,
            prompt_tokens,
            evals.response_length as response_length,
            eval_episodes.wanted as wanted
        from evals
        inner join eval_episodes using (rollout_id, env_example_id)
    )
)
group by env_example_id
