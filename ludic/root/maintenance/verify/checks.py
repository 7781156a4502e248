"""Define findings and the meanings of checks, and run the SQL checks of ludic/root/sql/checks/ and
ludic/root/sql/notes/."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import duckdb
import pyarrow as pa

from ludic.base import Part, Result, Sentence, Track, untracked
from ludic.errors import QueryError, one_line
from ludic.records import arrow_schema, as_schema
from ludic.root.attempts import find_cut
from ludic.root.root import Root
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.library import has_rows, load_checks, load_notes, mentioned, run_query

# --- Findings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem, or one harmless fact to note."""

    check: str
    """A key of MEANINGS, or the name of a file in ludic/root/sql/checks/ or ludic/root/sql/notes/."""
    where: str
    """Name of the file or folder below the root; empty if the finding spans files."""
    problem: str
    """The problem and its remedy."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VerifyReport(Result):
    """Findings of all checks on a root."""

    root: str
    """URL or path of the root."""
    findings: list[Finding]
    """Problems that remain; a root without findings is sound."""
    notes: list[Finding]
    """Harmless facts that are worth knowing."""
    repaired: list[Finding]
    """Problems and leftovers that were repaired."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"sound": not self.findings}

    def parts(self) -> Iterator[Part]:
        """The findings by check, each with what the check means."""
        kinds = ("repaired, ", self.repaired, "green"), ("", self.findings, "bold red"), ("note, ", self.notes, "dim")
        for prefix, findings, style in kinds:
            for check, found in groupby(findings, key=attrgetter("check")):
                yield Sentence(meaning_of(check), mark=f"{prefix}{check}: ", style=style)
                for finding in found:
                    yield f"  {finding.where}{': ' if finding.where else ''}{finding.problem}"
        if not self.findings:
            yield f"{self.root} is sound"

    @property
    def failure(self) -> str | None:
        """The number of findings of each check, such as "2 unreadable, 1 policy"."""
        if not self.findings:
            return None
        counts = Counter(sorted(finding.check for finding in self.findings))
        return f"{self.root} is not sound: {', '.join(f'{count} {check}' for check, count in counts.items())}"


MEANINGS = {
    "unreadable": "a file that no reader can use; `ludic verify --repair` moves it to quarantine/",
    "newer_schema": "a file that a newer ludic wrote; upgrade this one",
    "misnamed": "a file whose name does not match its content",
    "link": "a symbolic link that leads out of the run; ludic reads, writes and deletes nothing through it",
    "no_file": "a name that ludic can't read: a named pipe, a broken link, a key that is not a path; delete it",
    "scattered_groups": "a group whose rows are not adjacent in their file, as readers require",
    "compaction": "a compacted file that does not match the files that it replaces",
    "note": "a record of the run that was changed since it was written, or that ludic can't read",
    "model": "a file of the run's first model that was changed since the run began",
    "attempt": "an attempt of a trainer that can't be read",
    "worker": "a worker's claim of its slot that can't be read",
    "gateway": "a life of a gateway, or a claim of an episode, that can't be read",
    "call": "an agent's model call that does not match its digest, or that can't be put together",
    "settings": "settings in run.json that stop every worker and trainer; queries and maintenance do not need them",
    "code": "a copy of a user's file, or a list of them, that does not match its name",
    "policy": "published weights that can't be used",
    "checkpoint": "a checkpoint that no trainer can resume from",
    "unfinished": "interrupted work that does no harm",
    "leftover": "temporary files of writers that were killed",
    "no_digests": "files that an older ludic or another writer made, without digests of their bytes",
    "quarantined": "a broken file that was moved to quarantine/",
    "stray": "a file or a folder at the top of the run that does not belong to it; no command reads it",
}


def meaning_of(check: str) -> str:
    """Return the meaning of a check: its text in MEANINGS, or the first comment lines of its SQL file."""
    if check in MEANINGS:
        return MEANINGS[check]
    comment, _, _ = (load_checks() | load_notes())[check].partition("\n-- grain:")
    return " ".join(comment.replace("--", " ").split()).removeprefix(f"{check}: ")


def reason_of(error: Exception) -> str:
    """Return an error's message on one line, or the name of its class if the message is empty."""
    return one_line(error) or type(error).__name__


# --- Checks of one row at a time ------------------------------------------------------------------------------
# Run the data checks that look at one rollout at a time, on batches of rows as files are read.
#
# On a view of the run, long rollouts would need gigabytes: DuckDB holds 2,048 lists of tokens at a time.


ROW_CHECKS = ("not_finite", "unequal_lengths", "unsound_arrays", "untrainable_tokens")
"""Checks of rollouts whose result for a row needs no other row."""

MOST_SHOWN = 5
"""Maximum rows of a check that are listed; further rows are only counted."""

_GATHERED_BYTES = 32 << 20
_MOST_CHARACTERS = 80


class RowChecks:
    """Takes batches of any file, in any order, from several threads; runs the checks on each 32 MB of gathered rows."""

    def __init__(self, vocab_size: int | None = None) -> None:
        """vocab_size: tokens in the vocabulary of the run's model; None if the root keeps no model."""
        self._vocab_size = vocab_size
        self._con: duckdb.DuckDBPyConnection | None = None
        self._checks = {name: load_checks()[name] for name in ROW_CHECKS}
        schema = arrow_schema("rollouts")
        self._schema = pa.schema([schema.field(name) for name in mentioned(self._checks.values(), schema.names)])
        self._lock = threading.Lock()
        self._gathered: list[pa.Table] = []
        self._gathered_bytes = 0
        self._shown: dict[str, list[dict[str, Any]]] = {name: [] for name in ROW_CHECKS}
        self._counts: Counter[str] = Counter()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows of a rollouts file. The thread that fills the buffer runs the checks; other threads wait for it."""
        rows = as_schema(pa.Table.from_batches([batch]), self._schema, "rows")  # an older file lacks some columns
        with self._lock:
            self._gathered.append(rows)
            self._gathered_bytes += rows.nbytes
            if self._gathered_bytes >= _GATHERED_BYTES:
                self._run()

    def finish(self) -> Iterator[Finding]:
        """Check the remaining rows, and yield the findings for all rows."""
        with self._lock:
            if self._gathered:
                self._run()
        for name in ROW_CHECKS:
            yield from row_findings(name, self._shown[name], self._counts[name])

    def _run(self) -> None:
        con = self._con = self._con or self._connect()
        con.register("rollouts", pa.concat_tables(self._gathered))
        for name, sql in self._checks.items():
            found = run_query(con, sql)
            self._counts[name] += found.num_rows
            room = MOST_SHOWN - len(self._shown[name])
            self._shown[name] += found.slice(0, room).to_pylist()
        con.unregister("rollouts")
        self._gathered, self._gathered_bytes = [], 0

    def _connect(self) -> duckdb.DuckDBPyConnection:
        con = open_duckdb()
        if self._vocab_size is not None:
            con.execute(f"set variable vocab_size = {self._vocab_size:d}")
        return con


def row_findings(check: str, shown: list[dict[str, Any]], num_rows: int) -> Iterator[Finding]:
    """Yield a finding for each row that is shown, and one finding for all other rows."""
    for row in shown:
        values = ", ".join(f"{name} {_in_short(value)}" for name, value in row.items())
        yield Finding(check=check, where="", problem=values)
    if num_rows > len(shown):
        yield Finding(check=check, where="", problem=f"and {num_rows - len(shown):,} more rows like these")


def _in_short(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


# --- Checks of all rows ---------------------------------------------------------------------------------------
# Run the data checks of ludic/root/sql/checks/ that compare rows with each other, and the notes, over readable files.


_NOT_OF_A_CUT = ("step_gaps", "sequence_gaps")
"""Checks that a cut (`ludic cut`) fails by design: it lacks earlier steps, and files of other steps."""

_READ_OFTEN = ("all_batches", "batches", "rollouts", "evals", "gone", "attempts", "policies")
"""Views that several checks read. In a live run a row may refer to younger rows, so these are read later."""
_MOST_ROWS = 100_000
_COLUMNS = "select column_name from duckdb_columns() where schema_name = 'main' and table_name = ? and not internal"


@contextmanager
def small_views_as_tables(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Put temporary tables in the place of views that several checks read, if the run is small.

    DuckDB takes far longer to bind such a view than to run a check on so few rows. ROW_CHECKS have a connection of
    their own.
    """
    queries = [sql for name, sql in (load_checks() | load_notes()).items() if name not in ROW_CHECKS]
    made: list[str] = []
    try:
        for view in _READ_OFTEN:
            with suppress(duckdb.Error):  # a file can't be read, which each check that reads it reports
                # Lists stay out: no such check names one.
                columns = [name for (name,) in con.execute(_COLUMNS, [view]).fetchall()]
                chosen = ", ".join(f'"{name}"' for name in mentioned(queries, columns))
                con.execute(f"create temp table {view} as select {chosen} from main.{view} limit {_MOST_ROWS + 1}")  # noqa: S608
                made.append(view)
                if con.table(f"temp.{view}").shape[0] > _MOST_ROWS:
                    con.execute(f"drop table temp.{made.pop()}")
        yield
    finally:
        for view in made:
            con.execute(f"drop table temp.{view}")


def check_data(con: duckdb.DuckDBPyConnection, root: Root, track: Track = untracked) -> Iterator[Finding]:
    """Run the checks; findings show the first rows of each result. con: to the root without unreadable files."""
    left_out = {*ROW_CHECKS, *(_NOT_OF_A_CUT if find_cut(root) else ())}
    checks = {name: sql for name, sql in load_checks().items() if name not in left_out}
    return _run(con, track(checks.items(), len(checks), "data checks"))


def note_data(con: duckdb.DuckDBPyConnection) -> Iterator[Finding]:
    """Run the queries of ludic/root/sql/notes/; findings and `con` are as in check_data."""
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
