-- fifo: first in, first out: groups of the oldest weights first, then in order of arrival
-- grain: one row per group_id, the first rows make the batch | reads: groups
-- with max_uses above 1, a group keeps its position until it is used up
select group_id from groups order by queue_position
