-- scores: the value that each version of a scorer gave to a rollout; of a value that was given twice, the first counts
-- grain: one row per rollout_id, name, scorer and scorer_version; a failure is a row only while there is no value
-- reads: all_scores, where the costs of all calls are
-- NULL: as in schemas/scores.v1.json
select *
from all_scores
qualify
    (value is not null or count(value) over (partition by rollout_id, scorer, scorer_version) = 0)
    and row_number() over (
        partition by rollout_id, scorer, scorer_version, name order by value is null, created_at, value, duration_s
    ) = 1
