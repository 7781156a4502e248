-- ready: groups that wait no longer: all scorers have answered, none has to, or the time is over
-- grain: one row per group_id | reads: waiting, score_versions
-- $wait_s: seconds from `since` on, NULL for no limit; $now_s: on the same clock as `since`
select waiting.group_id
from waiting
left join (
    select group_id, count(*) filter (is_whole) as num_whole
    from score_versions
    group by group_id
) as answered on answered.group_id = waiting.group_id
group by waiting.group_id
having
    max(num_whole) = $num_scorers
    or bool_and(error is not null or refusal is not null)
    or coalesce(min(since) + $wait_s::double <= $now_s, false)
