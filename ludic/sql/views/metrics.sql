-- metrics: what each gradient step and each call of an engine measured
-- grain: one row per gradient step (kind train) or engine call (kind worker) | reads: metrics/ of the root
-- NULL: does not apply to this kind
select $columns
from (
    from $empty.metrics
    union all by name
    from read_parquet($root || '/metrics/**/*.parquet', schema = $schema, filename = true, allow_empty = true)
)
where not list_contains($without, filename)
