-- curriculum: groups that are neither too hard nor too easy, in order of arrival; other groups wait
-- grain: one row per group_id, the first rows make the batch | reads: groups
-- to write your own rule, copy this file and change the predicate
-- $min_success, $max_success: share of a group's scored episodes with a reward of at least $success
-- default: min_success = 0.2
-- default: max_success = 0.8
-- default: success = 1.0
select group_id
from groups
where list_avg([(reward >= $success)::integer for reward in rewards]) between $min_success and $max_success
order by queue_position
