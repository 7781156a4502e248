-- gone: files that are absent because they expired or were quarantined
-- grain: one row per partition, worker_id, run of sequences (first to last) and why | reads: expirations, quarantine,
-- compactions
-- partition: the folder, such as rollouts/version=12/env=moar_cats; a compacted file has a row under its own name, and
-- so do the files that it replaced
with expired as (
    select
        folder || '/version=' || version || '/env=' || url_encode(env_name) as partition,
        unnest(map_entries(files) || map_entries(sources)) as worker
    from expirations
),

broken as (
    select
        name,
        parse_dirpath(name) as partition,
        regexp_extract(name, '([^/]+)-(\d+)\.parquet$', ['worker_id', 'sequence']) as file
    from quarantine
    where starts_with(name, 'rollouts/') or starts_with(name, 'evals/')
)

select
    partition,
    worker.key as worker_id,
    unnest(worker.value)[1] as first_sequence,
    unnest(worker.value)[2] - 1 as last_sequence,
    'expired' as why
from expired
union
select partition, file.worker_id, try_cast(file.sequence as bigint), try_cast(file.sequence as bigint), 'quarantined'
from broken
union
select broken.partition, compactions.worker_id, compactions.sequence, compactions.sequence, 'quarantined'
from broken
inner join compactions using (name)
