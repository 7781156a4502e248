-- rollouts: what workers wrote to train on
-- grain: one row per rollout_id | reads: rollouts/ of the root, listed anew by each query
-- version and env are the partition; a filter on version skips files unread, one on policy_version or env does not
-- NULL: as in schemas/rollouts.v1.json; also a column that an older file lacks
select
    $columns,
    try_cast(regexp_extract(filename, '/version=(\d+)/env=[^/]*/[^/]*$', 1) as bigint) as version,
    url_decode(regexp_extract(filename, '/env=([^/]*)/[^/]*$', 1)) as env
from (
    from empty.rollouts
    union all by name
    from read_parquet(
        $root || '/rollouts/version=*/env=*/*.parquet',
        schema = $schema,
        filename = true,
        allow_empty = true
    )
)
where not list_contains($without, filename)
