"""The data checks of ludic/sql/checks/ that compare rows with each other, over what can be read of a root."""

from collections.abc import Iterable, Iterator

from ludic.errors import QueryError
from ludic.fsck.findings import Finding, reason_of
from ludic.fsck.rows import MOST_SHOWN, ROW_CHECKS, row_findings
from ludic.sql import connect
from ludic.sql.library import load_checks, run_query
from ludic.store import Root
from ludic.store.track import Track, untracked


def check_data(root: Root, without: Iterable[str], track: Track = untracked) -> Iterator[Finding]:
    """Each check that returns rows shows the first of them. without: names of files that can't be read."""
    con = connect(root, without=without)
    checks = {name: sql for name, sql in load_checks().items() if name not in ROW_CHECKS}
    for name, sql in track(checks.items(), len(checks), "data checks"):
        try:
            rows = run_query(con, sql)
        except QueryError as error:
            yield Finding(check=name, where="", problem=f"can't be checked: {reason_of(error)}")
        else:
            yield from row_findings(name, rows.slice(0, MOST_SHOWN).to_pylist(), rows.num_rows)
