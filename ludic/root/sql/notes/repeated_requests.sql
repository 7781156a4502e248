-- repeated_requests: a request of the schedule that is stored as more than one group; training uses the first and
-- drops the others as duplicate_request
-- grain: one row per group number (request_index // group_size) | reads: rollouts
-- imported rows, and rows of workers without a slot, belong to no request
select
    request_index // group_size as group_number,
    list(distinct group_id order by group_id) as group_ids,
    list(distinct worker_id order by worker_id) as worker_ids
from rollouts
where request_index >= 0 and regexp_matches(worker_id, '^w\d+-')
group by group_number
having count(distinct group_id) > 1
order by group_number
