-- judge: each pending row, and the first filter that drops it
-- grain: one row per rollout_id | reads: rollouts | the planner inserts the filters, named by $filter_names
-- duplicate_request is first: two workers of one slot sampled the same request, and another group serves it
-- max_uses precedes the filters: an earlier trainer may have used a group more often than this trainer allows
-- score_problem: unscored or mixed_scorers; filters come later, since they may read scores
-- NULL: reason of a row that is not dropped
select
    rollout_id,
    group_id,
    case
        when is_duplicate then 'duplicate_request'
        when num_uses >= $max_uses then 'max_uses'
        when score_problem is not null then score_problem
        else $filter_names[list_position([$predicates], true)]
    end as reason
from rollouts
