-- lost: what recorders could not store
-- grain: one row per life of a recorder that lost something | reads: workers | lost: as JSON text
select slot, life, worker_id, lost
from workers
where lost is not null
order by created_at, slot, life
