-- curriculum: groups that are neither too hard nor too easy, in order of arrival; other groups wait
-- grain: one row per group_id, the first rows make the batch | reads: groups
-- to write your own rule, copy this file and change the predicate
-- $min_success, $max_success: share of a group's scored episodes that succeed
-- $success: reward of a success; NULL: the answer is correct, where that is known, else the reward is 1 (is_success)
-- default: min_success = 0.2
-- default: max_success = 0.8
-- default: success = null
select group_id
from groups
where
    list_avg([is_success(each.reward, each.correct, $success::double)::integer for each in outcomes])
    between $min_success and $max_success
order by queue_position
