-- scores: the scores that SQL of a plan sees, of the groups that are ready
-- grain: one row per rollout_id, scorer and name; a failure is a row only if the rollout has no value
-- reads: waiting, ready, score_versions, found_scores
-- if versions may be mixed ($mixed), the newest version with a value counts for each rollout
with usable as (
    select found_scores.*
    from found_scores
    inner join waiting on waiting.rollout_id = found_scores.rollout_id
    inner join score_versions
        on score_versions.group_id = waiting.group_id and score_versions.scorer = found_scores.scorer
    where
        waiting.group_id in (select group_id from ready)
        and coalesce(found_scores.scorer_version = score_versions.scorer_version, $mixed)
),

of_one_version as (
    select *
    from usable
    qualify
        scorer_version = first_value(scorer_version) over (
            partition by rollout_id, scorer order by value is null, created_at desc, scorer_version
        )
)

select *
from of_one_version
qualify
    (value is not null or count(value) over (partition by rollout_id, scorer) = 0)
    and row_number() over (partition by rollout_id, scorer, name order by value is null, created_at, value) = 1
