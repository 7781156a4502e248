"""Queries: Ctrl-C ends one at once."""

import os
import signal
import threading

import duckdb
import pytest

from ludic.root.sql.query import interrupted_by_ctrl_c

CROSS_JOIN = "select count(*) from range(100000000) a, range(100000000) b where (a.range * b.range) % 7 = 3"


@pytest.mark.slow
def test_ctrl_c_ends_a_query_that_would_take_for_ever() -> None:
    con = duckdb.connect()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        _run_until_ctrl_c(con)


def _run_until_ctrl_c(con: duckdb.DuckDBPyConnection) -> None:
    with interrupted_by_ctrl_c(con):
        con.sql(CROSS_JOIN).fetchall()
