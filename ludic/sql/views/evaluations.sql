-- evaluations: what `ludic eval` samples and scores with
-- grain: one row per evaluation | reads: evaluations/ of the root
-- settings: of the environment, of sampling and of the agent, as JSON text; code: the code that scored, as JSON text
select $columns
from (
    from $empty.evaluations
    union all by name
    from read_json(files_of_$number('evaluations/*.json'), columns = $types, hive_partitioning = false, allow_empty = true)
)
