"""`ludic export ROOT --format ...`: the run's files as a Delta or an Iceberg table, or its rows as JSONL or CSV.

Tables name the files where they lie; JSONL and CSV stream, a row group in memory at once (with --sql, what DuckDB
needs). Raises ConfigError for options that do not go together and for a file that exists, StoreError for what a
table's writer refuses, QueryError for SQL.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa

from ludic.cli.output import plural, print_json, printable, progress_bar, stdout_console
from ludic.cli.settings import RootUrl
from ludic.cli.sql import open_result, open_sink, plain_rows, write_csv
from ludic.errors import ConfigError
from ludic.exchange.delta import export_delta
from ludic.exchange.iceberg import export_iceberg
from ludic.exchange.tables import TableReport
from ludic.exchange.whole_rows import whole_rows
from ludic.schema import resolve_row
from ludic.store import Root
from ludic.store.files import Folder

_ROWS_A_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    format: Literal["delta", "iceberg", "jsonl", "csv"]
    """delta and iceberg register the files that are there, without copying them; call again for new ones."""
    table: Folder = "rollouts"
    """What to export."""
    catalog: Path | None = None
    """Iceberg: local folder of the catalog; None takes ROOT/iceberg."""
    where: str | None = None
    """JSONL and CSV: a SQL predicate, such as "policy_version > 3"; None takes all rows."""
    sql: str | None = None
    """JSONL and CSV: a whole query instead, as `ludic sql` takes it."""
    out: Path | None = None
    """JSONL and CSV: file to write, which must not be there; None writes to stdout."""
    json: bool = False
    """Delta and Iceberg: print the report as JSON."""

    def __post_init__(self) -> None:
        is_text = self.format in ("jsonl", "csv")
        misplaced = {"catalog": self.format != "iceberg", "json": is_text}
        misplaced |= dict.fromkeys(("where", "sql", "out"), not is_text)
        for name, is_misplaced in misplaced.items():
            if is_misplaced and getattr(self, name):
                raise ConfigError(f"--{name} says nothing to --format {self.format}; leave it out")
        if self.where and self.sql:
            raise ConfigError("--where and --sql both choose the rows; give one of them")


def main(settings: Settings) -> None:
    root = Root.open(settings.root)
    if settings.format in ("jsonl", "csv"):
        _write_text(root, settings)
        return
    with progress_bar() as track:
        if settings.format == "delta":
            report = export_delta(root, settings.table, track)
        else:
            report = export_iceberg(root, settings.table, settings.catalog, track)
    _print(report, settings)


def _write_text(root: Root, settings: Settings) -> None:
    if settings.out is not None and settings.out.exists():
        raise ConfigError(f"{settings.out} exists; choose another --out, or delete it")
    if settings.sql is not None:
        with open_result(root, settings.sql, rows_a_batch=_ROWS_A_BATCH) as result:
            _write_rows(result.schema.names, _rows(result), settings)
    else:
        result = whole_rows(root, settings.table, _matching(root, settings))
        # Steps refer to messages for their texts; who reads text wants them in place.
        _write_rows(result.schema.names, map(resolve_row, _rows(result)), settings)


def _matching(root: Root, settings: Settings) -> set[str] | None:
    """Ids of the rows that --where asks for; None for all."""
    if settings.where is None:
        return None
    # On lines of its own, so that a comment at its end hides nothing.
    query = f"select rollout_id from {settings.table} where (\n{settings.where}\n)"  # noqa: S608
    with open_result(root, query) as result:
        return {rollout_id for batch in result for rollout_id in batch.column("rollout_id").to_pylist()}


def _rows(result: pa.RecordBatchReader) -> Iterator[dict[str, Any]]:
    names = result.schema.names
    return (dict(zip(names, values, strict=True)) for values in plain_rows(result))


def _write_rows(names: Sequence[str], rows: Iterable[Mapping[str, Any]], settings: Settings) -> None:
    with open_sink(settings.out) as sink:
        if settings.format == "jsonl":
            _write_jsonl(rows, sink)
        else:
            write_csv(names, (row.values() for row in rows), sink)


def _write_jsonl(rows: Iterable[Mapping[str, Any]], sink: BinaryIO) -> None:
    """An object a line."""
    for row in rows:
        sink.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _print(report: TableReport, settings: Settings) -> None:
    if settings.json:
        print_json({"format": settings.format, **asdict(report)})
    else:
        changes = f"{plural(report.num_added, 'file')} added, {report.num_removed:,} removed"
        text = f"{report.location}: {settings.format} table of {plural(report.num_files, 'file')}; {changes}"
        stdout_console().print(printable(text), soft_wrap=True)
    for name, reason in report.left_out.items():
        print(printable(f"ludic: {name} was left out: {reason}"), file=sys.stderr)
