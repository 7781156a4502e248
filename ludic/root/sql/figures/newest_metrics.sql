-- newest_metrics: the newest 1,000 steps of metrics, and the newest 10,000 rows of workers
-- grain: one row of metrics | reads: metrics
from metrics
qualify row_number() over (partition by kind order by created_at desc) <= if(kind = 'worker', 10_000, 1_000)
