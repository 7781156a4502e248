-- incomplete_groups: a group with too few or too many episodes, or whose rows disagree on group_size
-- grain: one row per such group_id | reads: rollouts
select
    group_id,
    min(group_size) as group_size,
    max(group_size) as group_size_max,
    count(distinct episode_id) as num_episodes
from rollouts
group by group_id
having count(distinct episode_id) <> min(group_size) or min(group_size) <> max(group_size)
