"""Plan how calls become rows: the parent, the segment and the fate of each call, by ludic/root/sql/assembly/plan.sql.

Pure: takes and returns Arrow tables. The rules are in the SQL file alone. Raises QueryError if DuckDB refuses a table.
"""

import threading

import duckdb
import pyarrow as pa

from ludic.base import read_packaged
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.library import run_query

CALL_COLUMNS = (
    *("episode_id", "attempt", "call_id", "event", "created_at", "began_at", "request_digest", "idempotency_digest"),
    *("retry_of", "prompt_length"),
)
"""Columns of the table calls that the plan reads; the others of `call_events` are is_current, has_whole and
num_sampled."""
PREFIXES = pa.schema(
    [
        ("episode_id", pa.string()),
        ("attempt", pa.int64()),
        ("call_id", pa.string()),
        ("unit", pa.string()),
        ("length", pa.int64()),
        ("digest", pa.binary()),
        ("is_whole", pa.bool_()),
    ]
)
"""Digests of the beginnings of calls; see plan.sql."""

_own = threading.local()


def plan_calls(events: pa.Table, prefixes: pa.Table) -> pa.Table:
    """Return one row for each call, in the order of the calls in each episode; see plan.sql.

    events: rows of the table calls, of any number of episodes, with CALL_COLUMNS, is_current, has_whole and
    num_sampled. prefixes: PREFIXES.
    """
    con = _connection()
    con.register("call_events", events)
    con.register("call_prefixes", prefixes)
    try:
        return run_query(con, read_packaged("assembly", "plan"))
    finally:
        con.unregister("call_events")
        con.unregister("call_prefixes")


def _connection() -> duckdb.DuckDBPyConnection:
    """Return this thread's connection: opening one takes longer than a plan."""
    if not hasattr(_own, "con"):
        _own.con = open_duckdb()
        _own.con.execute("set threads = 1")  # a few hundred rows; threads only cost
    con: duckdb.DuckDBPyConnection = _own.con
    return con
