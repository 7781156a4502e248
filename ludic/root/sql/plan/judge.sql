-- judge: each pending row, and the first filter that drops it
-- grain: one row per rollout_id | reads: rollouts | the planner inserts the filters, named by $filter_names
-- refusal is first, whatever the rules are: another group serves the request (duplicate_request), or the row is of
-- another run, whose worker outlived it (other_run)
-- max_uses precedes the filters: an earlier trainer may have used a group more often than this trainer allows
-- untrainable: training could not use the row (ludic.records.validation), as was found when a plan had chosen it
-- score_problem: unscored or mixed_scorers; filters come later, since they may read scores
-- no_logprobs, text_capture: nobody kept the logprobs that the row was sampled with, or its tokens were made later from a
-- text, and $needs_logprobs, since the objective takes a ratio to the sampler
-- no_tokens: the row has no sampled token, or none that max_seq_len leaves
-- filters come before these, since they say more
-- NULL: reason of a row that is not dropped
select
    rollout_id,
    group_id,
    case
        when refusal is not null then refusal
        when num_uses >= $max_uses then 'max_uses'
        when rollout_id in (select rollout_id from untrainable) then 'untrainable'
        when score_problem is not null then score_problem
        else coalesce(
            $filter_names[list_position([$predicates], true)],
            case
                when $needs_logprobs and capture = 'ids' then 'no_logprobs'
                when $needs_logprobs and capture = 'text' then 'text_capture'
                when num_trained_tokens = 0 then 'no_tokens'
            end
        )
    end as reason
from rollouts
