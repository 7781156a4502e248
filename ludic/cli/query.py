"""Rows of a run for commands to show, and DuckDB's errors in words."""

from collections.abc import Mapping
from typing import Any

import duckdb

from ludic.errors import QueryError
from ludic.store import Root


def ask(con: duckdb.DuckDBPyConnection, root: Root, sql: str, params: Mapping[str, Any] | None = None) -> list[dict]:
    """Rows as dicts. Raises QueryError."""
    try:
        table = con.sql(sql, params=dict(params) if params else None).to_arrow_table()
    except duckdb.Error as error:
        raise QueryError(explain(error, root)) from error
    return table.to_pylist(maps_as_pydicts="lossy")


def explain(error: Exception, root: Root) -> str:
    """DuckDB's reason in a line, without its drawing of the place; where to look when a file may be at fault."""
    reason = " ".join(str(error).split("\n\nLINE ")[0].split())
    if root.path not in reason and isinstance(error, _SQL_AT_FAULT):
        return reason
    return f"{reason}; if a file is broken, `ludic verify {root.url}` names it"


_SQL_AT_FAULT = (
    duckdb.ProgrammingError,
    duckdb.DataError,
    duckdb.NotSupportedError,
    duckdb.IOException,
    duckdb.OutOfMemoryException,
)
"""Unless the message names a file of the run."""
