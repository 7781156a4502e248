-- doubled_calls: a model call that was stored with two answers
-- grain: one row per call_id | reads: calls
-- a row that is stored twice, as during a compaction, has one digest
select call_id, min(episode_id) as episode_id, count(distinct call_digest) as num_answers
from calls
where event = 'call'
group by call_id
having count(distinct call_digest) > 1
order by call_id
