-- curriculum: groups that are neither too hard nor too easy, in the order of arrival; the others wait
-- grain: one row per group_id, the first ones make the batch | reads: groups
-- a rule of your own is a file like this one with another predicate
-- $min_success, $max_success: share of a group's scored episodes with a reward of at least $success
-- default: min_success = 0.2
-- default: max_success = 0.8
-- default: success = 1.0
select group_id
from groups
where list_avg([(reward >= $success)::integer for reward in rewards]) between $min_success and $max_success
order by place
