"""Run SQL for commands, interrupt it on Ctrl-C, and explain DuckDB's errors."""

import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import duckdb

from ludic.errors import QueryError
from ludic.store import Root


def ask(con: duckdb.DuckDBPyConnection, root: Root, sql: str, params: Mapping[str, Any] | None = None) -> list[dict]:
    """Return the rows of a query as dicts. Raises QueryError if it fails."""
    try:
        table = con.sql(sql, params=dict(params) if params else None).to_arrow_table()
    except duckdb.Error as error:
        raise QueryError(explain(error, root)) from error
    return table.to_pylist(maps_as_pydicts="lossy")


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
            # Repeatedly: a query that has not begun yet does not notice an interrupt.
            while not done.wait(_INTERRUPT_EVERY_S):
                con.interrupt()

    thread = threading.Thread(target=interrupt, name="ludic-interrupt", daemon=True)
    thread.start()
    try:
        yield
    except (duckdb.Error, RuntimeError):  # DuckDB also looks for signals, and raises "Query interrupted"
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
    reason = " ".join(str(error).split("\n\nLINE ")[0].split())
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
