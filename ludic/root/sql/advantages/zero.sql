-- zero: advantage 0 for all rollouts; for training on a KL term alone, such as distillation
-- grain: one row per rollout_id | reads: rollouts
-- NULL: never
select rollout_id, 0 as advantage
from rollouts
