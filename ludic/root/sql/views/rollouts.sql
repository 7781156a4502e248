-- rollouts: rollouts to train on; evals: rollouts sampled for evaluation
-- grain: one row per rollout_id | reads: $folder/ of the root, as it was at the first query; ludic.refresh updates it
-- version and env are the partition; a filter on version skips files unread, a filter on policy_version or env does not
-- lists of rows that are not compacted yet are read when they are used; see ludic/root/sql/listed_files.py
-- capture: by the macro capture_of, also of rows that were imported before there was this column
-- NULL: as in schemas/rollouts.v1.json; also a column that an older file lacks
select $columns_by_address, version, env
from (
    from $empty.segments
    union all by name
    from read_parquet(segments_of_$number('$folder'), schema = $segment_schema, allow_empty = true)
)
union all
select
    $columns_of_compacted,
    try_cast(regexp_extract(filename, '/version=(\d+)/env=[^/]*/[^/]*$', 1) as bigint) as version,
    url_decode(regexp_extract(filename, '/env=([^/]*)/[^/]*$', 1)) as env
from (
    from $empty.rollouts
    union all by name
    from read_parquet(compacted_of_$number('$folder'), schema = $schema, filename = true, allow_empty = true)
)
