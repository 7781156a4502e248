-- all_labels: every stored label, also those that their author replaced or withdrew
-- grain: one row per stored row | reads: labels/ of the root
-- NULL: as in schemas/labels.v1.json
select $columns
from (
    from $empty.labels
    union all by name
    from read_parquet(
        files_of_$number('labels/*.parquet'), schema = $schema, filename = true, hive_partitioning = false, allow_empty = true
    )
)
where not list_contains($without, filename)
