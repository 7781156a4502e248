-- marks: labels of rollouts; each is shown as its mark, or as a star if it is only a note
-- grain: one row per labelled rollout_id | reads: labels
select rollout_id, string_agg(coalesce(text, value::varchar, '*'), ' ' order by created_at) as marks
from labels
group by rollout_id
