-- workers: each life of a worker, and its slot of the schedule; or of a recorder (ludic.record), which has no schedule
-- grain: one row per slot and life | reads: workers/ of the root
-- the newest life of a slot owns it; an older life ends at its next check
-- lost: what a recorder could not store, as JSON text
-- NULL: ended_at of a worker that is alive or was killed; lost if a recorder lost nothing, and of workers
select $columns
from $stored
