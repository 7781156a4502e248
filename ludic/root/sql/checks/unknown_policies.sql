-- unknown_policies: rollouts sampled with a version of the weights that no trainer published in this root
-- grain: one row per such policy_version | reads: rollouts, policies
-- a root without policies holds imported rollouts, and is not checked
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
