-- all_scores: every stored row of scores, also failures that were tried again and values that were given twice
-- grain: one row per stored row | reads: scores/ of the root
-- NULL: as in schemas/scores.v1.json
select $columns
from (
    from $empty.scores
    union all by name
    from read_parquet(
        files_of_$number('scores/scorer=*/*.parquet'),
        schema = $schema,
        filename = true,
        hive_partitioning = false,
        allow_empty = true
    )
)
where not list_contains($without, filename)
