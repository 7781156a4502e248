-- ended_by: the one word for what ended a rollout: a limit, or finish_reason, which is the model's end of the answer
-- max_tokens: the last answer was cut there; the row has finish_reason length, and truncation_reason max_steps if the
-- refused answer was the last that the episode allowed, as that to a question always is
-- NULL: nothing is known
create or replace macro ended_by(truncation_reason, finish_reason, parse_error) as
case
    when finish_reason = 'length' and truncation_reason is null then 'max_tokens'
    when finish_reason = 'length' and truncation_reason = 'max_steps' and parse_error then 'max_tokens'
    else coalesce(truncation_reason, finish_reason)
end
