-- zero: no reward counts; for what learns from a KL alone, as distillation does
-- grain: one row per rollout_id | reads: rollouts
-- NULL: never
select rollout_id, 0 as advantage
from rollouts
