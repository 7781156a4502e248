"""Rows of a run for commands to show, and DuckDB's errors in words."""

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
    """Rows as dicts. Raises QueryError."""
    try:
        table = con.sql(sql, params=dict(params) if params else None).to_arrow_table()
    except duckdb.Error as error:
        raise QueryError(explain(error, root)) from error
    return table.to_pylist(maps_as_pydicts="lossy")


_INTERRUPT_EVERY_S = 0.05


@contextmanager
def interrupted_by_ctrl_c(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """A signal ends the query that runs at once; Python's own handlers wait until DuckDB returns.

    Does nothing outside of the main thread, which alone receives signals.
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
            # Again and again: a query that has not begun yet would not notice.
            while not done.wait(_INTERRUPT_EVERY_S):
                con.interrupt()

    thread = threading.Thread(target=interrupt, name="ludic-interrupt", daemon=True)
    thread.start()
    try:
        yield
    except (duckdb.Error, RuntimeError):  # DuckDB looks for signals too, and then says: Query interrupted
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
    """DuckDB's reason in a line, without its drawing of the place; where to look when a file may be at fault."""
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
"""Unless the message names a file of the run."""
