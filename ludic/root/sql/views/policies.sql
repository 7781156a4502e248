-- policies: versions of the weights that were claimed; their weights are written later and may be deleted again
-- grain: one row per version | reads: policies/version=*/policy.json of the root
-- NULL: parent_version of the run's first weights
select $columns
from $stored
