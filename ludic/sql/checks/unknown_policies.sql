-- unknown_policies: rollouts sampled with a version of the weights that no trainer published here
-- grain: one row per such policy_version | reads: rollouts, policies
-- a root without policies holds rollouts from elsewhere, and is not asked
select policy_version, count(*) as num_rollouts
from (
    select policy_version from rollouts
    union all
    select policy_version_last from rollouts where policy_version_last <> policy_version
)
where
    exists (from policies)
    and policy_version not in (select version from policies)
group by policy_version
order by policy_version
