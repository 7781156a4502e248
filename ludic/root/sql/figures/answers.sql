-- answers: rollouts with their first question, last answer and messages, and the newest step that considered them
-- grain: one row per rollout_id | reads: rollouts, batches
-- NULL: step of a rollout that no step considered; dropped_by of one that was used, or that no step considered
with uses as (
    select
        rollout_id,
        max(step) as step,
        max_by(advantage, step) as advantage,
        max_by(if(used, null, reason), step) as dropped_by
    from batches
    group by rollout_id
)
select
    rollout_id,
    group_id,
    run_id,
    env_name,
    env_example_id,
    policy_version,
    list_filter(messages, lambda message: message.role = 'user')[1].content as prompt,
    list_filter(messages, lambda message: message.role = 'assistant')[-1].content as answer,
    wanted,
    correct,
    episode_reward as reward,
    cast(to_json(reward_components) as varchar) as reward_components,
    example_columns,
    response_length,
    finish_reason,
    error,
    step,
    advantage,
    dropped_by,
    list_transform(messages, lambda message: {'role': message.role, 'content': message.content}) as messages
from rollouts
left join uses using (rollout_id)
order by rollout_id
