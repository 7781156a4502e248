-- score_versions: the version of each scorer whose scores a waiting group uses
-- grain: one row per group_id and scorer with a score in the group | reads: waiting, found_scores
-- a version that has scored all rows of the group counts, of several the newest; else the only version that is there
-- failed and refused rollouts need no score; a failure of a scorer counts as its answer
-- is_whole: true if all rows have an answer of one version, or of any version if versions may be mixed ($mixed)
-- NULL: scorer_version of a group whose rows were scored by different versions
with needed as (
    select group_id, rollout_id, count(*) over (partition by group_id) as group_rows
    from waiting
    where error is null and refusal is null
),

answers as (
    select
        needed.group_id,
        needed.rollout_id,
        needed.group_rows,
        found_scores.scorer,
        found_scores.scorer_version,
        found_scores.created_at,
        count(distinct needed.rollout_id) over (partition by needed.group_id, found_scores.scorer) as num_answered
    from needed
    inner join found_scores on found_scores.rollout_id = needed.rollout_id
),

versions as (
    select
        group_id,
        scorer,
        scorer_version,
        max(created_at) as newest,
        count(distinct rollout_id) = any_value(group_rows) as scored_all,
        any_value(num_answered = group_rows) as is_answered
    from answers
    group by group_id, scorer, scorer_version
)

select
    group_id,
    scorer,
    coalesce(
        arg_max(scorer_version, newest) filter (scored_all), case when count(*) = 1 then any_value(scorer_version) end
    ) as scorer_version,
    bool_or(scored_all) or ($mixed and bool_or(is_answered)) as is_whole
from versions
group by group_id, scorer
