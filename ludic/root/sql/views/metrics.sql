-- metrics: measurements of each gradient step, and of what a worker appended
-- grain: one row per gradient step (kind train), or environment of the groups appended together (kind worker) | reads: metrics/ of the root
-- NULL: the column does not apply to this kind
select $columns
from $stored
