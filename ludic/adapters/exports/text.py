"""Export rows as JSON Lines, in a stream with one row group in memory; a query takes as much as DuckDB needs.

Raises ConfigError if the target exists, QueryError if the SQL fails.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ludic.base import Part, Result, local_path, open_sink, plain_rows, plural, write_jsonl
from ludic.errors import ConfigError
from ludic.records import resolve_row
from ludic.root import Root
from ludic.root.rows import Folder, whole_rows
from ludic.root.sql import open_result
from ludic.settings import SettingsError

_ROWS_A_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TextReport(Result):
    """Result of an export of rows as text."""

    format: str = "jsonl"
    location: str | None
    """The written file; None for stdout, or a file that the caller opened."""
    num_rows: int

    def parts(self) -> Iterator[Part]:
        """A sentence; nothing beside rows on stdout."""
        if self.location is not None:
            yield f"{self.location}: {plural(self.num_rows, 'row')}"

    @property
    def is_out(self) -> bool:
        return self.location is None


def export_text(
    root: Root, target: str | BinaryIO | None, *, table: Folder, where: str | None, sql: str | None
) -> TextReport:
    """Write the rows of a table that match `where`, or the result of a query.

    target: a file that does not exist, or an open binary file; None is stdout.
    """
    sink = new_sink(target)
    if sql is not None:
        with open_result([root], sql, rows_a_batch=_ROWS_A_BATCH) as result:
            return _write(result.schema.names, plain_rows(result), sink)
    result = whole_rows(root, table, matching_ids(root, table, where))
    return _write(result.schema.names, _resolved_rows(result), sink)


def new_sink(target: str | BinaryIO | None) -> Path | BinaryIO:
    """Return the open file to write to, or the path of a file that does not exist."""
    if target is None:
        sys.stdout.flush()
        if not hasattr(sys.stdout, "buffer"):  # as in a notebook
            raise SettingsError("format jsonl needs out: a file that does not exist")
        return sys.stdout.buffer
    if not isinstance(target, str):
        return target
    path = local_path(target, "the target")
    if path.exists():
        raise ConfigError(f"{path} exists; choose another target, or delete it")
    return path


def matching_ids(root: Root, table: Folder, where: str | None) -> set[str] | None:
    """Return the ids of the rows that match `where`; None means all rows."""
    if where is None:
        return None
    # The predicate has its own lines, so that a comment at its end does not hide the parenthesis.
    query = f"select rollout_id from {table} where (\n{where}\n)"  # noqa: S608
    with open_result([root], query) as result:
        return {rollout_id for batch in result for rollout_id in batch.column("rollout_id").to_pylist()}


def _resolved_rows(result: pa.RecordBatchReader) -> Iterator[list[Any]]:
    """Yield plain rows. Steps refer to messages for their texts; readers of text get the texts themselves."""
    names = result.schema.names
    for values in plain_rows(result):
        row = resolve_row(dict(zip(names, values, strict=True)))
        yield [row[name] for name in names]


def _write(names: Sequence[str], rows: Iterable[list[Any]], sink: Path | BinaryIO) -> TextReport:
    """Write rows, each with a value for each name, as JSON Lines."""
    num_rows = 0

    def counted() -> Iterator[list[Any]]:
        nonlocal num_rows
        for row in rows:
            num_rows += 1
            yield row

    with open_sink(sink) as file:
        write_jsonl(names, counted(), file)
    return TextReport(location=str(sink) if isinstance(sink, Path) else None, num_rows=num_rows)
