-- unsound_labels: a label with a number and a text, with a number that is NaN or infinite, or without a name or author
-- grain: one row per such row of all_labels | reads: all_labels
select rollout_id, name, value, text, author
from all_labels
where (value is not null and text is not null) or not isfinite(value) or name = '' or author = ''
