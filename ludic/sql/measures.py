"""Measures of evaluations: a value for each episode, or for each example, of which an evaluation reports the mean.

A measure is one SELECT over `eval_episodes` that returns evaluation, policy_version, env_name, env_example_id and value
(a number; NULL is left out and counted), and `part` if it measures several things. A measure is a share if all its
values are 0 or 1. The column `num_trials` says otherwise: the number of independent trials that a value between 0 and 1
stands for, or NULL for what is never a share, such as a count. Reads ludic/sql/measures/ and users'
*.sql; parameters and defaults are those of ludic.sql.library. Raises QueryError with the file, the reason and the
wanted form.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa

from ludic.code.kinds import MEASURE
from ludic.errors import QueryError
from ludic.sql.library import SqlText, check_parameters, load_text, run_query

_WANTED = (
    "wanted one SELECT over eval_episodes that returns evaluation, policy_version, env_name, env_example_id and value "
    "(a number), and may return part (text) if it measures several things, and num_trials (an integer)"
)
KEYS = ("evaluation", "policy_version", "env_name", "part")
"""Columns that tell figures of one measure apart."""

_ONE_IF_BINARY = "if(value in (0, 1), 1, null)"
_BY_EXAMPLE = """
with eval_episodes as (
    {over}
),

measured as (
    {measure}
)

select
    evaluation,
    policy_version,
    env_name,
    {part} as part,
    env_example_id,
    sum(value)::double as total,
    count(value) as num_values,
    count(*) - count(value) as num_missing,
    if(
        bool_and(({trials}) is not null) filter (value is not null),
        sum({trials}) filter (value is not null),
        null
    )::double as num_trials
from measured
group by all
order by all
"""


def load_measure(name_or_path: str) -> SqlText:
    """Load a measure: a name in ludic/sql/measures/, or the path of a .sql file."""
    return load_text(MEASURE, name_or_path, "{}", _WANTED)


def check_measure_parameters(measures: Iterable[SqlText], given: Mapping[str, Any]) -> None:
    """Raise ConfigError if no measure takes a given parameter."""
    check_parameters(measures, given, known=())


def run_measure(con: duckdb.DuckDBPyConnection, measure: SqlText, params: Mapping[str, Any], *, over: str) -> pa.Table:
    """Return a measure's values, added up for each example: KEYS, env_example_id, total, num_values, num_missing,
    num_trials (NULL unless the values are a share).

    over: SELECT of the episodes to measure. Rows are sorted.
    """
    values = measure.bind(params)
    try:
        columns = _columns(con, measure, values, over)
        part = "part" if "part" in columns else "null::varchar"
        trials = "num_trials" if "num_trials" in columns else _ONE_IF_BINARY
        return run_query(con, _BY_EXAMPLE.format(over=over, measure=measure.text, part=part, trials=trials), values)
    except QueryError as error:
        raise QueryError(f"{measure.source}: {error}; {_WANTED}") from error


def _columns(con: duckdb.DuckDBPyConnection, measure: SqlText, values: Mapping[str, Any], over: str) -> Sequence[str]:
    """Return the columns of a measure. Raises QueryError for others than wanted."""
    sql = f"with eval_episodes as (\n{over}\n)\nselect * from (\n{measure.text}\n) limit 0"
    columns = run_query(con, sql, values).column_names
    wanted = {"evaluation", "policy_version", "env_name", "env_example_id", "value"}
    if set(columns) - {"part", "num_trials"} != wanted:
        raise QueryError(f"returns {', '.join(columns)}")
    return columns
