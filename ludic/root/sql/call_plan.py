"""Plan how calls become rows: the parent, the segment and the fate of each call, by ludic/root/sql/assembly/plan.sql.

Pure. The rules are in the SQL file alone. Raises QueryError if DuckDB refuses a table.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from string import Template
from typing import Any

import duckdb
import pyarrow as pa

from ludic.base import read_packaged
from ludic.errors import QueryError
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.library import reason_of

CALLS_TO_PLAN = pa.schema(
    [
        *[("scope", pa.int64()), ("number", pa.int64()), ("call_id", pa.string()), ("event", pa.string())],
        *[("idempotency_digest", pa.string()), ("retry_of", pa.string()), ("continues", pa.string())],
        *[("is_current", pa.bool_()), ("has_whole", pa.bool_()), ("num_sampled", pa.int64())],
    ]
)
PREFIXES = pa.schema(
    [
        *[("scope", pa.int64()), ("number", pa.int64()), ("unit", pa.string()), ("length", pa.int64())],
        *[("digest", pa.binary()), ("is_whole", pa.bool_())],
    ]
)


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One row of plan.sql."""

    number: int
    parent: int | None
    """Number of the call that it extends."""
    segment: int | None
    """Number of the first call of its segment; None if it is in none."""
    is_extended: bool
    """True if a later call extends it."""
    reason: str | None
    """Why it is not trained on; None if it is."""


_own = threading.local()


def plan_calls(calls: pa.Table, prefixes: pa.Table) -> list[PlannedCall]:
    """Return one row for each call, by number. calls: CALLS_TO_PLAN. prefixes: PREFIXES; see plan.sql."""
    con = _connection()
    con.register("calls", calls)
    con.register("prefixes", prefixes)
    try:
        # Not as Arrow: `con.sql` would plan the query twice, which takes as long as to run it.
        return [PlannedCall(*row) for row in con.execute(_plan_sql()).fetchall()]
    except duckdb.Error as error:
        raise QueryError(reason_of(error)) from error
    finally:
        con.unregister("calls")
        con.unregister("prefixes")


@cache
def _plan_sql() -> str:
    return Template(read_packaged("assembly", "plan")).substitute(rivals=read_packaged("assembly", "rivals"))


def table_of(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """Return rows, each with the values of all columns, as a table."""
    columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(values, each.type) for values, each in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _connection() -> duckdb.DuckDBPyConnection:
    """Return this thread's connection: opening one takes longer than a plan."""
    if not hasattr(_own, "con"):
        _own.con = open_duckdb()
        _own.con.execute("set threads = 1")  # for some hundred rows, more threads only cost
    con: duckdb.DuckDBPyConnection = _own.con
    return con
