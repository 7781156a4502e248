"""Run the data checks of ludic/sql/checks/ that compare rows with each other, and the notes, over readable files."""

from collections.abc import Iterable, Iterator

import duckdb

from ludic.errors import QueryError
from ludic.maintenance.verify.findings import Finding, reason_of
from ludic.maintenance.verify.rows import MOST_SHOWN, ROW_CHECKS, row_findings
from ludic.sql.library import has_rows, load_checks, load_notes, run_query
from ludic.store import Root
from ludic.store.attempts import find_cut
from ludic.store.root import Track, untracked

_NOT_OF_A_CUT = ("step_gaps", "sequence_gaps")
"""Checks that a cut (`ludic cut`) fails by design: it lacks the steps before, and files of other steps."""


def check_data(con: duckdb.DuckDBPyConnection, root: Root, track: Track = untracked) -> Iterator[Finding]:
    """Run the checks; findings show the first rows of each result. con: to the root without unreadable files."""
    left_out = {*ROW_CHECKS, *(_NOT_OF_A_CUT if find_cut(root) else ())}
    checks = {name: sql for name, sql in load_checks().items() if name not in left_out}
    return _run(con, track(checks.items(), len(checks), "data checks"))


def note_data(con: duckdb.DuckDBPyConnection) -> Iterator[Finding]:
    """Run the queries of ludic/sql/notes/; findings and `con` are as in check_data."""
    return _run(con, load_notes().items())


def _run(con: duckdb.DuckDBPyConnection, queries: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    for name, sql in queries:
        try:
            if not has_rows(con, sql):
                continue
            rows = run_query(con, sql)
        except QueryError as error:
            yield Finding(check=name, where="", problem=f"can't be checked: {reason_of(error)}")
        else:
            yield from row_findings(name, rows.slice(0, MOST_SHOWN).to_pylist(), rows.num_rows)
