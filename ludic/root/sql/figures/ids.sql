-- ids: ids of rollouts and groups that equal, begin with or end with $id, exact ones first
-- grain: one row per id, kind and version | reads: rollouts, evals
-- $kinds: list of rollout, group
with seen as (
    select rollout_id, group_id, version from rollouts
    union all
    select rollout_id, group_id, version from evals
),

ids as (
    select rollout_id as id, 'rollout' as kind, version from seen
    union
    select group_id as id, 'group' as kind, version from seen
)

select id, kind, id = $id as exact, version
from ids
where (starts_with(id, $id) or ends_with(id, $id)) and list_contains($kinds, kind)
order by exact desc, id
