-- expirations: the files that `ludic expire` deleted or will delete, by partition
-- grain: one row per expiry and partition | reads: expired/ of the root
-- files: deleted files; sources: files that workers had committed with their rows; half-open intervals by worker_id
with tombstones as (
    select
        from_json(
            content,
            '{
                "created_at": "timestamptz",
                "rule": "varchar",
                "partitions": [{
                    "folder": "varchar",
                    "version": "bigint",
                    "env_name": "varchar",
                    "num_rows": "bigint",
                    "size_bytes": "bigint",
                    "files": "map(varchar, bigint[][])",
                    "sources": "map(varchar, bigint[][])"
                }]
            }'
        ) as tombstone
    from read_text(files_of_$number('expired'))
    where json_valid(content)
)
select tombstone.created_at, tombstone.rule, unnest(tombstone.partitions, recursive := true) from tombstones
