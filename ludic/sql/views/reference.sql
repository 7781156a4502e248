-- reference: logprobs of rollouts under reference models that --reference-cache stored
-- grain: one row per rollout, model and file; two trainers at the same time may store a rollout twice
-- reads: reference/ of the root
select $columns
from (
    from $empty.reference
    union all by name
    from read_parquet(
        files_of_$number('reference/**/*.parquet'),
        schema = $schema,
        filename = true,
        hive_partitioning = false,
        allow_empty = true
    )
)
where not list_contains($without, filename)
