-- labels_of_rollout: labels of rollout $id, oldest first
-- grain: one row per author and name | reads: labels
select name, value, text, note, author, created_at
from labels
where rollout_id = $id
order by created_at
