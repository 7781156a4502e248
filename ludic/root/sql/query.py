"""Run SQL over runs: users' queries, which may only read, users' predicates, and ludic's own queries.

Ctrl-C interrupts a user's query at once. Raises QueryError with DuckDB's reason in one line.
"""

import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from ludic.errors import QueryError, one_line
from ludic.records import plain_rows
from ludic.root.root import Root
from ludic.root.sql.connection import check_only_reads, connect, open_duckdb, seal
from ludic.root.sql.library import reason_of, required_columns, run_query, where_filter

if TYPE_CHECKING:
    import polars as pl

Params = Sequence[Any] | Mapping[str, Any]
"""Values of a query's parameters: a list for ?, in order, or a mapping for $names."""

_ROWS_A_BATCH = 10_000
_UNSAFE = "`--unsafe`, in Python unsafe=True, allows it; use it only for a query that you trust"
_SEALED = re.compile(r"disabled (by|through) configuration|configuration has been locked")


@contextmanager
def open_result(
    roots: Sequence[Root], query: str, params: Params = (), *, rows_a_batch: int = _ROWS_A_BATCH, unsafe: bool = False
) -> Iterator[pa.RecordBatchReader]:
    """Yield the result as a stream, open until the block ends. Raises QueryError, also if reading the stream fails.

    A query may only read, and only the files of these runs. unsafe: run any statement; it may read and write files.
    """
    if not query.strip():
        raise QueryError('the query is empty, wanted SQL such as "select count(*) from rollouts"')
    con = connect(roots, sealed=not unsafe)
    with result_of(con, roots, query, params, rows_a_batch=rows_a_batch, unsafe=unsafe) as rows:
        yield rows


@contextmanager
def result_of(
    con: duckdb.DuckDBPyConnection,
    roots: Sequence[Root],
    query: str,
    params: Params = (),
    *,
    rows_a_batch: int = _ROWS_A_BATCH,
    unsafe: bool = False,
) -> Iterator[pa.RecordBatchReader]:
    """Yield the result of a query on a connection of `connect(roots, sealed=True)`, as `open_result` does."""
    with _guarded(con, roots, query, unsafe=unsafe):
        relation = con.sql(query, params=params or None)
        if relation is None:
            yield pa.table({}).to_reader()
        else:
            yield _with_unique_names(relation.to_arrow_reader(rows_a_batch))


def rows_of(
    con: duckdb.DuckDBPyConnection, roots: Sequence[Root], query: str, params: Params = ()
) -> list[dict[str, Any]]:
    """Return the rows of a query that may only read, whose columns have different names, as dicts. For few rows.

    It takes 10 ms less than `result_of`, for which DuckDB binds the query twice: the views have many columns.
    """
    with _guarded(con, roots, query, unsafe=False):
        found = con.execute(query, params or None)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


@contextmanager
def _guarded(con: duckdb.DuckDBPyConnection, roots: Sequence[Root], query: str, *, unsafe: bool) -> Iterator[None]:
    """Refuse a query that does not only read, and explain the errors of the block."""
    try:
        with interrupted_by_ctrl_c(con):
            if not unsafe:
                _check_only_reads(con, query)
            yield
    except (duckdb.PermissionException, duckdb.InvalidInputException) as error:
        if not _SEALED.search(str(error)):
            raise QueryError(explain(error, *roots)) from error
        raise QueryError(
            f"the query reaches outside of {' and '.join(root.url for root in roots)}: {one_line(error)}; {_UNSAFE}"
        ) from error
    except (duckdb.Error, pa.ArrowException) as error:
        raise QueryError(explain(error, *roots)) from error
    except OSError as error:
        if error.errno is not None:  # of a file or a pipe that the rows are written to
            raise
        raise QueryError(explain(error, *roots)) from error  # of Arrow, such as for a batch of more than 2 GB of text


def _check_only_reads(con: duckdb.DuckDBPyConnection, query: str) -> None:
    try:
        check_only_reads(con, query)
    except QueryError as error:
        raise QueryError(f"{error}; `ludic sql --out FILE` saves a result; {_UNSAFE}") from None


def _with_unique_names(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Rename columns of equal names, which SQL allows and JSON and Parquet do not, to a, a_1, ..."""
    names: list[str] = []
    for name in reader.schema.names:
        candidate, number = name, 0
        while candidate in names:
            number += 1
            candidate = f"{name}_{number}"
        names.append(candidate)
    if names == reader.schema.names:
        return reader
    schema = pa.schema([field.with_name(name) for field, name in zip(reader.schema, names, strict=True)])
    return pa.RecordBatchReader.from_batches(schema, (batch.rename_columns(names) for batch in reader))


def to_frame(reader: pa.RecordBatchReader) -> "pl.DataFrame":
    """Return a result as a Polars DataFrame. Raises QueryError for a type that Polars does not have."""
    import polars as pl

    unknown = ", ".join(f"{field.name} ({field.type})" for field in reader.schema if _is_not_of_polars(field.type))
    if unknown:
        raise QueryError(f"Polars has no type for the columns {unknown}; cast them, such as a_column::varchar")
    table = reader.read_all()
    try:
        frame = pl.from_arrow(table)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # pyo3's PanicException is not an Exception
        raise QueryError(f"Polars can't hold the result: {type(error).__name__}; cast columns of rare types") from error
    assert isinstance(frame, pl.DataFrame)
    return frame


def _is_not_of_polars(kind: pa.DataType) -> bool:
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return pa.types.is_interval(kind) or pa.types.is_union(kind) or any(map(_is_not_of_polars, inner))


def ask(con: duckdb.DuckDBPyConnection, root: Root, sql: str, params: Mapping[str, Any] | None = None) -> list[dict]:
    """Return the rows of a query as dicts. Raises QueryError if it fails."""
    return plain_rows(ask_table(con, root, sql, params), maps_as_dicts=True)


def ask_table(
    con: duckdb.DuckDBPyConnection, root: Root, sql: str, params: Mapping[str, Any] | None = None
) -> pa.Table:
    """Return the rows of a query as a table. Raises QueryError if it fails."""
    try:
        return con.sql(sql, params=dict(params) if params else None).to_arrow_table()
    except duckdb.Error as error:
        raise QueryError(explain(error, root)) from error


_INTERRUPT_EVERY_S = 0.05


@contextmanager
def interrupted_by_ctrl_c(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """End the running query at once on Ctrl-C; Python's own handlers would wait until DuckDB returns.

    Does nothing outside the main thread, since only that thread receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    here, there = socket.socketpair()
    there.setblocking(False)
    before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    pressed, done = threading.Event(), threading.Event()

    def interrupt() -> None:
        while (number := here.recv(1)) and number[0] != signal.SIGINT:
            pass
        if number:
            pressed.set()
            # Repeat, since a query that has not begun yet ignores an interrupt.
            while not done.wait(_INTERRUPT_EVERY_S):
                con.interrupt()

    thread = threading.Thread(target=interrupt, name="ludic-interrupt", daemon=True)
    thread.start()
    try:
        yield
    except (duckdb.Error, RuntimeError):  # DuckDB also checks for signals, and raises "Query interrupted"
        if pressed.is_set():
            raise KeyboardInterrupt from None
        raise
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        there.close()
        thread.join()
        here.close()


def explain(error: Exception, *roots: Root) -> str:
    """Return DuckDB's message as one line, without its excerpt of the SQL; adds advice if a file may be broken."""
    reason = reason_of(error)
    named = [root for root in roots if root.path in reason]
    if not named and isinstance(error, _SQL_AT_FAULT):
        return reason
    commands = " or ".join(f"`ludic verify {root.url}`" for root in named or roots)
    return f"{reason}; if a file is broken, {commands} names it"


_SQL_AT_FAULT = (
    duckdb.ProgrammingError,
    duckdb.DataError,
    duckdb.NotSupportedError,
    duckdb.IOException,
    duckdb.OutOfMemoryException,
)
"""Errors caused by the SQL, unless the message names a file of the run."""


# --- Predicates over a table in memory -----------------------------------------------------------------
# They read no files.

_EXAMPLES = {
    "metrics": "reward_mean > 0.5",
    "batches": "count(*) filter (not used) > 10",
    "rollouts": "avg(episode_reward) > 0.5",
    "evals": "avg(episode_reward) > 0.5",
}


class Predicate:
    """A predicate over the rows of one table: an aggregate such as avg(x) > 1, or an expression of a row."""

    def __init__(self, text: str, table: str, schema: pa.Schema) -> None:
        """Check the predicate over no rows. Raises QueryError if it is not one expression that is true or false."""
        self.text, self._table = text, table
        parsed = where_filter(text)
        if parsed.parameters:
            raise QueryError(f"({text}): takes ${min(parsed.parameters)}; write the value into the predicate")
        mentioned = required_columns([parsed], schema.names)
        self.columns = [name for name in schema.names if name in mentioned] or schema.names[:1]
        """Columns that the text mentions; the first one if it mentions none, so that rows can be counted."""
        self._con = open_duckdb()
        seal(self._con)
        type_ = self._run(schema.empty_table()).schema.field("hit").type
        if not (pa.types.is_boolean(type_) or pa.types.is_null(type_)):
            raise QueryError(f"({text}): is {type_}, not true or false; wanted a predicate such as {_EXAMPLES[table]}")

    def is_true_of(self, rows: pa.Table) -> bool | None:
        """Return whether the predicate is true of the rows, or of any one row; None if it is NULL for all."""
        hits = self._run(rows)["hit"].to_pylist()
        return True if True in hits else False if False in hits else None

    def _run(self, rows: pa.Table) -> pa.Table:
        self._con.register(self._table, rows)
        try:
            # The text is one expression (where_filter), on a connection that can access only this table.
            return run_query(self._con, f"select (\n{self.text}\n) as hit from {self._table}")  # noqa: S608
        except QueryError as error:
            raise QueryError(f"({self.text}): {error}") from error
        finally:
            self._con.unregister(self._table)
