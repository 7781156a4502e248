-- model_calls: agents' model calls, each by its answer, else its failure, else its intent
-- grain: one row per call_id | reads: calls
-- is_open: it has only an intent: it is under way, or its gateway died before the answer was stored
-- rows that are stored twice, as during a compaction, count once
select *, event = 'intent' as is_open
from calls
qualify
    row_number() over (
        partition by call_id
        order by if(event = 'call', 0, if(event = 'failed', 1, 2)), created_at
    ) = 1
