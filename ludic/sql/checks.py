"""Data checks over a run. Each check is a SQL file in ludic/sql/checks/ that returns the offending rows.

Reads the views of `ludic.connect`, with token lists. No rows means that the data is sound. Raises QueryError if a
file can't be read (`connect(root, without=...)` leaves it out).
"""

import duckdb
import pyarrow as pa

from ludic.errors import QueryError
from ludic.sql.library import load_checks, run_query


def run_checks(con: duckdb.DuckDBPyConnection) -> dict[str, pa.Table]:
    """Return the offending rows by the name of the check; a check without findings has an empty table."""
    return {name: _run(con, name, sql) for name, sql in load_checks().items()}


def _run(con: duckdb.DuckDBPyConnection, name: str, sql: str) -> pa.Table:
    try:
        return run_query(con, sql)
    except QueryError as error:
        raise QueryError(f"check {name}: {error}") from error
