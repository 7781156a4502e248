-- batches: the ledger without superseded steps: the rollouts that each gradient step used or dropped
-- grain: one row per step and rollout_id | reads: all_batches
-- NULL: as in schemas/batches.v1.json
select * exclude (superseded)
from all_batches
where not superseded
