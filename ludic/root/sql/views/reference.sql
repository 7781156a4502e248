-- reference: logprobs of rollouts under reference models that --reference-cache stored
-- grain: one row per rollout, model and file; two trainers at the same time may store a rollout twice
-- reads: reference/ of the root
select $columns
from $stored
