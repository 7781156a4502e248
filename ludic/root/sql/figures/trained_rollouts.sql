-- trained_rollouts: rollouts that gradient steps used, and those of them whose text is not stored here
-- grain: one row | reads: batches, rollouts
select
    count(*) as num_trained,
    count(*) filter (rollout_id not in (select rollout_id from rollouts)) as num_absent
from (select distinct rollout_id from batches where used)
