-- fifo: first in, first out: groups of the oldest weights first, then in order of arrival
-- grain: one row per group_id, the first rows make the batch | reads: queue, which has group_id and queue_position of
-- groups: all that this needs, in less time
-- with max_uses above 1, a group keeps its position until it is used up
select group_id from queue order by queue_position
