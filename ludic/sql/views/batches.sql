-- batches: the ledger of the run as it stands, what each gradient step trained on and dropped
-- grain: one row per step and rollout_id | reads: all_batches
-- NULL: as in schemas/batches.v1.json
select * exclude (superseded)
from all_batches
where not superseded
