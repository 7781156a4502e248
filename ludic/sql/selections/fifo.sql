-- fifo: first in, first out: the oldest weights first, then in the order of arrival
-- grain: one row per group_id, the first ones make the batch | reads: groups
-- a group that is used several times (max_uses) comes first again, until it is used up
select group_id from groups order by place
