-- unsound_scores: a score with neither a value nor an error, with both, or with a value that is NaN or infinite
-- grain: one row per such row of all_scores | reads: all_scores
select rollout_id, name, scorer, scorer_version, value, error
from all_scores
where (value is null) <> (error is not null) or not isfinite(value)
