"""Run the data checks that look at one rollout at a time, on batches of rows as files are read.

On a run's view they would need gigabytes if rollouts are long: DuckDB holds 2,048 lists of tokens at a time.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ludic.maintenance.verify.findings import Finding
from ludic.schema import arrow_schema
from ludic.sql.connect import open_duckdb
from ludic.sql.library import load_checks, run_query

ROW_CHECKS = ("not_finite", "unequal_lengths", "untrainable_tokens")
"""Checks of ludic/sql/checks/ whose result for a row needs no other row."""

MOST_SHOWN = 5
"""Maximum rows of a check that are listed; further rows are only counted."""

_GATHERED_BYTES = 32 << 20
_MOST_CHARACTERS = 80


class RowChecks:
    """Takes batches of any file, in any order, from several threads; runs the checks on each 32 MB of gathered rows."""

    def __init__(self, vocab_size: int | None = None) -> None:
        """vocab_size: tokens that the run's model knows; None if the root keeps no model."""
        self._con = open_duckdb()
        if vocab_size is not None:
            self._con.execute(f"set variable vocab_size = {vocab_size:d}")
        self._checks = {name: load_checks()[name] for name in ROW_CHECKS}
        words = {word for sql in self._checks.values() for word in re.findall(r"\w+", sql)}
        self._schema = pa.schema([field for field in arrow_schema("rollouts") if field.name in words])
        self._lock = threading.Lock()
        self._gathered: list[pa.Table] = []
        self._gathered_bytes = 0
        self._shown: dict[str, list[dict[str, Any]]] = {name: [] for name in ROW_CHECKS}
        self._counts: Counter[str] = Counter()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows of a rollouts file. The thread that fills the buffer runs the checks; other threads wait for it."""
        rows = pa.Table.from_batches([batch]).select(self._schema.names).cast(self._schema)
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
        self._con.register("rollouts", pa.concat_tables(self._gathered))
        for name, sql in self._checks.items():
            found = run_query(self._con, sql)
            self._counts[name] += found.num_rows
            room = MOST_SHOWN - len(self._shown[name])
            self._shown[name] += found.slice(0, room).to_pylist()
        self._con.unregister("rollouts")
        self._gathered, self._gathered_bytes = [], 0


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
