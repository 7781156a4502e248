-- accuracy_by_column: share of correct answers of the rollouts of each version, by a value of theirs
-- grain: one row per version and value | reads: rollouts
-- $value: an expression over rollouts; see ludic.root.sql.reports.accuracy_by
-- NULL: accuracy if it is not known of any rollout whether its answer is correct; value of rollouts without one
select version, $value as value, avg(correct::integer) as accuracy
from rollouts
group by all
order by version, value
