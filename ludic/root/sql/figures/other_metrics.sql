-- other_metrics: numbers of a recorded trainer under its own names, without steps that a later attempt has replaced
-- grain: one row per name | reads: metrics, attempt_chain | values_by_step: in order of steps
with named as (
    select step, unnest(map_entries(other)) as entry
    from metrics
    inner join attempt_chain using (attempt_id)
    where kind = 'train' and step >= first_step and step <= coalesce(last_step, step) and other is not null
)

select
    entry.key as name,
    list(entry.value order by step) as values_by_step,
    arg_min(entry.value, step) as first_value,
    arg_max(entry.value, step) as last_value,
    min(entry.value) as lowest,
    max(entry.value) as highest
from named
where entry.value is not null
group by name
order by name
