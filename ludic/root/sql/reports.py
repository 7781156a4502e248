"""Compute the figures of a run from the SQL files of ludic/root/sql/figures/, and the reports of `ludic watch
--totals`.

Each file is one SELECT; its first comment says what it gives. Raises QueryError if a file of the run can't be read
(`connect(root, without=...)` leaves it out).
"""

import re
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

import duckdb
import pyarrow as pa

from ludic.base import read_packaged
from ludic.errors import QueryError, similar_names
from ludic.root.json_records import Folder
from ludic.root.root import Root
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.library import quote, reason_of
from ludic.root.sql.query import ask, ask_table


def figure(name: str) -> str:
    """Return the SQL of a figure: ludic/root/sql/figures/NAME.sql."""
    return read_packaged("figures", name)


def means(keys: str, rows: Folder) -> str:
    """Return the SQL of counts, means and fractions. keys: columns to group by, joined by commas.

    Rollouts have equal weight; in evaluations examples have, whatever their number of samples.
    """
    text = figure("means_of_examples") if rows == "evals" else figure("means")
    return Template(text).substitute(keys=keys)


def by_column(con: duckdb.DuckDBPyConnection, name: str, rows: Folder = "rollouts") -> str:
    """Return an SQL expression over the relation `rows`, to group by: a column of it, or of the data set.

    name: may come from outside. A column of `rows` is taken first, then a key of the JSON in `example_columns`, then a
    path of keys, such as meta.level. The value of a key is text; NULL in rows without the key.
    Raises QueryError, which lists columns and keys, for an unknown name; also for a column of lists, structs or maps.
    """
    try:
        types = _types(con, rows)
        if name in types:
            if types[name].id in _NESTED:
                raise QueryError(f"column {name!r} holds a {types[name].id} in each row; wanted one value to group by")
            return '"' + name.replace('"', '""') + '"'
        for keys in ([name], *([name.split(".")] if "." in name else [])):
            # `try`: other programs may have written a text that is not JSON.
            if con.sql(f"from {rows} where try(json_exists(example_columns, {_path(keys)})) limit 1").fetchall():
                return value_of_example(*keys)
        found = _keys(con, rows)
    except (duckdb.Error, UnicodeEncodeError) as error:
        raise QueryError(f"column {name!r}: {reason_of(error)}") from error
    raise QueryError(_unknown_column(name, found, _plain(types), rows))


def columns_to_group(con: duckdb.DuckDBPyConnection, rows: Folder = "rollouts") -> tuple[list[str], list[str]]:
    """Return the names that `by_column` takes: keys of the data set, and columns of `rows`. Raises QueryError."""
    try:
        return _keys(con, rows), _plain(_types(con, rows))
    except duckdb.Error as error:
        raise QueryError(f"columns of the data set: {reason_of(error)}") from error


def value_of_example(*keys: str) -> str:
    """Return an SQL expression over rows of rollouts: a value of the JSON in `example_columns` as text.

    keys: the path to it; they may come from outside. NULL in rows without it.
    """
    return f"try(json_extract_string(example_columns, {_path(keys)}))"


def _path(keys: Sequence[str]) -> str:
    return _on_one_line("".join(f"/{key.replace('~', '~0').replace('/', '~1')}" for key in keys))


def _types(con: duckdb.DuckDBPyConnection, rows: Folder) -> dict[str, Any]:
    head = con.sql(f"from {rows} limit 0")
    return dict(zip(head.columns, head.types, strict=True))


def _plain(types: Mapping[str, Any]) -> list[str]:
    return [column for column, type_ in types.items() if type_.id not in _NESTED]


def _keys(con: duckdb.DuckDBPyConnection, rows: Folder) -> list[str]:
    return [key for (key,) in con.sql(Template(_KEYS).substitute(rows=rows)).fetchall()]


def _on_one_line(text: str) -> str:
    """Return a quoted SQL string without line breaks: one in a comment of a template would end the comment."""
    return "||".join(
        f"chr({ord(part)})" if part in "\r\n" else quote(part) for part in re.split("([\r\n])", text) if part
    )


_NESTED = ("list", "array", "struct", "map")
_MOST_KEYS, _MOST_COLUMNS, _SHOWN_KEY = 20, 8, 40
_KEYS = """
select distinct unnest(try(json_keys(example_columns))) as key
from (select distinct example_columns from $rows)
order by key
"""


def _unknown_column(name: str, keys: Sequence[str], columns: Sequence[str], rows: Folder) -> str:
    close = similar_names(name, [*keys, *columns])
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ";"
    is_plain = [key.strip() == key != "" and key.isprintable() and len(key) <= _SHOWN_KEY for key in keys]
    shown = [key if plain else repr(key[:_SHOWN_KEY]) for key, plain in zip(keys, is_plain, strict=True)]
    others = f" and {len(keys) - _MOST_KEYS:,} more" if len(keys) > _MOST_KEYS else ""
    of_data = f"has the columns {', '.join(shown[:_MOST_KEYS])}{others}" if keys else "has no further columns here"
    first = f"{', '.join(columns[:_MOST_COLUMNS])}{', ...' if len(columns) > _MOST_COLUMNS else ''}"
    return f"column {name!r} is unknown{hint} the data set {of_data}; {rows} have {first}"


def means_of_evaluation(rows: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of `means` by environment, of rows of evals/ of one version, with SCALAR_COLUMNS."""
    with open_duckdb() as con:
        con.register("stored", rows)
        con.execute("create temp view evals as select *, policy_version as version, env_name as env from stored")
        con.execute(f"create temp view eval_episodes as\n{read_packaged('views', 'eval_episodes')}")
        return con.sql(means("env_name", "evals")).to_arrow_table().to_pylist()


def texts(rows: Folder) -> str:
    """Return the SQL of the beginnings of questions and answers of rollouts."""
    return Template(figure("texts_of_rollouts")).safe_substitute(rows=rows)


def steps_by(con: duckdb.DuckDBPyConnection, root: Root, column: str, after_step: int = 0) -> list[dict[str, Any]]:
    """Return means of each gradient step after a step, by a value of the rollouts that it considered.

    column: see `by_column`. Columns of the rows: step, value, reward_mean, response_length_mean (tokens), signal (share
    of groups whose rewards differ), truncated_fraction, error_fraction; an unknown number is None. The value of a
    rollout that is not in this root is None, its environment aside. Raises QueryError for an unknown column.
    """
    is_environment = column == "env_name"  # which the ledger knows of all rollouts
    values = {
        "value": "batches.env_name" if is_environment else "stored.value",
        "stored_value": "null" if is_environment else by_column(con, column),
    }
    sql = Template(figure("steps_by_column")).safe_substitute(values)
    return ask(con, root, sql, {"after_step": after_step})


def steps_by_environment(con: duckdb.DuckDBPyConnection, root: Root, after_step: int = 0) -> list[dict[str, Any]]:
    """Return the rows of `steps_by` by environment, in a column env_name. Report and trackers show these series."""
    rows = steps_by(con, root, "env_name", after_step)
    return [{"step": row["step"], "env_name": row["value"], **_without(row, "step", "value")} for row in rows]


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def accuracy_by(con: duckdb.DuckDBPyConnection, root: Root, column: str) -> list[dict[str, Any]]:
    """Return the share of correct answers of each version's rollouts by a value of theirs: version, value, accuracy.

    column: see `by_column`. accuracy is None where no environment says which answers are correct.
    """
    sql = Template(figure("accuracy_by_column")).substitute(value=by_column(con, column))
    return ask(con, root, sql)


def rewards_by(con: duckdb.DuckDBPyConnection, root: Root, column: str, most: int) -> list[dict[str, Any]]:
    """Return the rewards of the `most` values of a column that most rollouts have: a row per value.

    column: see `by_column`. Columns of the rows: value (text, or None), num_rollouts, rewards (of each group its mean
    over scored rollouts; None without any), num_values and num_in_all (of all values, those left out too).
    """
    sql = Template(figure("rewards_by_column")).safe_substitute(value=by_column(con, column))
    return ask(con, root, sql, {"most": most})


def components_by_environment(con: duckdb.DuckDBPyConnection, root: Root, after_step: int = 0) -> list[dict[str, Any]]:
    """Return the mean of each reward component of each gradient step after a step, by environment.

    Columns: step, env_name, component, value_mean, over the considered rollouts that have the component.
    """
    return ask(con, root, figure("components_by_environment"), {"after_step": after_step})


def read_reports(con: duckdb.DuckDBPyConnection, root: Root) -> dict[str, pa.Table]:
    """Return each report by name; rollouts and steps have one row, the others a row per item. Reads no tokens."""
    reports = {
        "rollouts": figure("rollouts"),
        "environments": means("env_name", "rollouts"),
        "versions": means("version", "rollouts"),
        "evals": means("policy_version, env_name", "evals"),
        "steps": figure("totals_of_steps"),
        "drops": figure("drops"),
        "attempts": figure("attempts"),
        "scores": figure("scores"),
        "lost": figure("lost"),
    }
    return {name: ask_table(con, root, sql) for name, sql in reports.items()}
