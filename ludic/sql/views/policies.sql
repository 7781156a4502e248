-- policies: versions of the weights that were claimed; their weights are written later and may be deleted again
-- grain: one row per version | reads: policies/version=*/policy.json of the root
-- NULL: parent_version of the run's first weights
select $columns
from (
    from $empty.policies
    union all by name
    from read_json(
        files_of_$number('policies/version=*/policy.json'),
        columns = $types,
        hive_partitioning = false,
        allow_empty = true
    )
)
