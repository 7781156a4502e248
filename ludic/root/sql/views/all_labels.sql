-- all_labels: every stored label, also those that their author replaced or withdrew
-- grain: one row per stored row | reads: labels/ of the root
-- NULL: as in schemas/labels.v1.json
select $columns
from $stored
