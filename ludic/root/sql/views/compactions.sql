-- compactions: the files that `ludic compact` wrote or will write, and the files whose rows they hold
-- grain: one row per compacted file and source | reads: compactions/ of the root
-- name: the compacted file; worker_id and sequence: the file that a worker committed
with plans as (
    select from_json(content, '{"outputs": [{"name": "varchar", "sources": ["json[]"]}]}') as plan
    from read_text(files_of_$number('compactions'))
    where json_valid(content)
),

outputs as (
    select unnest(plan.outputs, recursive := true) from plans
)

select name, source[1] ->> '$' as worker_id, (source[2] ->> '$')::bigint as sequence
from (select name, unnest(sources) as source from outputs)
