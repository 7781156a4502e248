-- judge: each pending row, and the first filter that drops it
-- grain: one row per rollout_id | reads: rollouts | the planner puts the filters in, named by $filter_names
-- duplicate_request comes before all: two workers of one slot sampled the same, and another group has the request
-- max_uses comes before the filters: an earlier trainer may have used a group more often than this one would
-- NULL: reason of a row that nothing drops
select
    rollout_id,
    group_id,
    case
        when is_duplicate then 'duplicate_request'
        when num_uses >= $max_uses then 'max_uses'
        else $filter_names[list_position([$predicates], true)]
    end as reason
from rollouts
