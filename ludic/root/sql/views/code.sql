-- code: the code that decided rewards and advantages
-- grain: one row per attempt, or per slot and life of a worker, and role and name | reads: attempts/, workers/, code/
-- text: content of a user's file; installed code is identified by package and sha256
-- NULL: attempt_id of a worker's life; slot, life and worker_id of an attempt; path and text of installed code
with lives as (
    select
        attempt_id,
        null::bigint as slot,
        null::bigint as life,
        null::varchar as worker_id,
        unnest(code) as record
    from (
        select null::integer as attempt_id, $records as code, null::varchar as filename
        where false
        union all by name
        from read_json(
            files_of_$number('attempts'),
            columns = {'attempt_id': 'integer', 'code': $records_type},
            filename = true,
            hive_partitioning = false,
            allow_empty = true
        )
    )
    where not list_contains($without, filename)
    union all by name
    select
        null::integer as attempt_id,
        slot,
        life,
        worker_id,
        unnest(code) as record
    from (
        select
            null::bigint as slot,
            null::bigint as life,
            null::varchar as worker_id,
            $records as code,
            null::varchar as filename
        where false
        union all by name
        from read_json(
            files_of_$number('workers'),
            columns = {'slot': 'bigint', 'life': 'bigint', 'worker_id': 'varchar', 'code': $records_type},
            filename = true,
            hive_partitioning = false,
            allow_empty = true
        )
    )
    where not list_contains($without, filename)
)

select
    attempt_id,
    slot,
    life,
    worker_id,
    record.role,
    record.name,
    record.sha256,
    record.path,
    record.package,
    record.imports,
    text_of_code_$number(record.sha256, record.path) as text
from lives
