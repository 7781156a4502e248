-- chosen_rows: the rows of the chosen groups that no filter drops, with the addresses of their tokens
-- grain: one row per rollout_id | reads: rollouts, chosen, judged | NULL: root, since all are rows of this run
select rollout_id, group_id, file, row_group, "row", prompt_length, response_length, null::varchar as root
from rollouts
where
    group_id in (select group_id from chosen)
    and rollout_id in (select rollout_id from judged where reason is null)
