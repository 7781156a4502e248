-- all_scores: every stored row of scores, also failures that were tried again and values that were given twice
-- grain: one row per stored row | reads: scores/ of the root
-- NULL: as in schemas/scores.v1.json
select $columns
from $stored
