-- newest_metrics: the newest 1,000 rows of each kind of metrics
-- grain: one row of metrics | reads: metrics
from metrics
qualify row_number() over (partition by kind order by created_at desc) <= 1000
