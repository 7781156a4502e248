"""Keep the rows of the ledger in the memory of a connection, so that its queries read no file of batches/ again.

A viewer asks the same connection again and again, and each question about training would read a file for each gradient
step: 50 ms for 400 steps on a disk, 400 requests on a bucket. Files with an advantage for each token are read as
before, since they need the memory of all tokens. If files can't be read, the views stay as they are.
"""

import logging
import threading
from collections.abc import Iterable
from string import Template

import duckdb

from ludic.base import read_packaged
from ludic.errors import LudicError, one_line
from ludic.root.catalogue import ATTEMPTS, BATCHES
from ludic.root.root import Root
from ludic.root.sql.library import escape_glob, quote_list
from ludic.root.sql.root_views import rows_of_files

logger = logging.getLogger(__name__)


class KeptLedger:
    """The ledger of one root of a connection. Threads may share it."""

    def __init__(self, root: Root, number: int, url: str) -> None:
        """number: of the root's views, in the schema root_{number}. url: DuckDB's name of the root."""
        self._root, self._number, self._url = root, number, url
        self._lock = threading.Lock()
        self._known: frozenset[str] = frozenset()
        """Files that the view shows."""
        self._attempts: frozenset[str] = frozenset()
        """Attempts that decide which of its rows are superseded."""
        self._left: frozenset[str] = frozenset()
        """Those with an advantage for each token, which are not in memory."""
        self._generation = 0

    def renew(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Let later queries show the ledger as it is stored now; a query that runs sees what it began with."""
        with self._lock, connection.cursor() as con:
            try:
                names = frozenset(BATCHES.names(self._root))
                attempts = frozenset(ATTEMPTS.names(self._root))
                if (names, attempts) != (self._known, self._attempts):
                    con.execute(f"use root_{self._number}")
                    con.execute("begin")
                    left = self._keep(con, names)
                    con.execute("commit")
                    self._known, self._attempts, self._left = names, attempts, left
                    self._generation += 1
            except (duckdb.Error, LudicError) as error:  # a query that reads the file says so
                logger.debug("can't keep the ledger of %s in memory: %s", self._root.url, one_line(error))

    def _keep(self, con: duckdb.DuckDBPyConnection, names: frozenset[str]) -> frozenset[str]:
        """Make the next table of rows, and the view that shows it; returns the files that are read as before."""
        new = names - self._known
        with_tokens = f"select distinct kept_from from ({self._rows(new)}) where token_advantages is not null"  # noqa: S608
        found = {url.removeprefix(f"{self._url}/") for (url,) in con.execute(with_tokens).fetchall()} if new else set()
        left = (self._left & names) | found
        before, now = (f"kept_ledger_{self._generation + each}" for each in range(2))
        rows = self._rows(new - left)
        if self._generation:
            urls = quote_list(f"{self._url}/{name}" for name in sorted(names))
            rows = f"from {before} where list_contains({urls}, kept_from) union all by name {rows}"
        con.execute(f"create table {now} as {rows}")
        con.execute(f"drop table if exists {before}")
        stored = f"select * exclude (kept_from) from {now}"  # noqa: S608
        if left:
            stored += f" union all by name select * exclude (kept_from) from ({self._rows(left)})"  # noqa: S608
        query = Template(read_packaged("views", "all_batches")).substitute(stored=f"({stored})")
        con.execute(f"drop table if exists shown_{before}")
        if not left:  # the join that finds superseded rows takes 0.1 s for 100,000
            con.execute(f"create table shown_{now} as\n{query}")
            query = f"from shown_{now}"
        con.execute(f"create or replace view all_batches as\n{query}")
        return left

    def _rows(self, names: Iterable[str]) -> str:
        """Return a SELECT of the rows of some files, and of each row the URL of its file."""
        urls = quote_list(escape_glob(f"{self._url}/{name}") for name in sorted(names))
        return rows_of_files(BATCHES, self._number, f"{urls}::varchar[]", "filename as kept_from, ")
