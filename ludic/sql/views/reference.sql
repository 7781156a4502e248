-- reference: logprobs of rollouts under reference models, as far as --reference-cache kept them
-- grain: one row per rollout, model and file; what two trainers computed at once may be there twice
-- reads: reference/ of the root
select $columns
from (
    from $empty.reference
    union all by name
    from read_parquet(
        $root || '/reference/**/*.parquet',
        schema = $schema,
        filename = true,
        hive_partitioning = false,
        allow_empty = true
    )
)
where not list_contains($without, filename)
