"""`ludic export ROOT --format ...`: export a run's files as a table, its rows as text, its weights for Hugging Face.

delta and iceberg register the existing files without a copy; jsonl and csv stream with one row group in memory (with
--sql, as much as DuckDB needs); hf copies weights (ludic.interop.weights). Raises ConfigError if options conflict or
the output file exists, StoreError if a table's writer fails, QueryError if the SQL fails.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ludic.cli.flags.export import Settings
from ludic.cli.sql import open_result, open_sink, plain_rows, write_csv
from ludic.errors import ConfigError
from ludic.interop.delta import export_delta
from ludic.interop.iceberg import export_iceberg
from ludic.interop.tables import TableReport
from ludic.interop.whole_rows import whole_rows
from ludic.paths import local_path
from ludic.schema import resolve_row
from ludic.store import Root
from ludic.viewer.output import json_text, plural, print_json, printable, progress_bar, size, stdout_console

_ROWS_A_BATCH = 64


def main(settings: Settings) -> None:
    root = Root.open(settings.root)
    if settings.format == "hf":
        _write_weights(root, settings)
        return
    if settings.format in ("jsonl", "csv"):
        _write_text(root, settings)
        return
    with progress_bar() as track:
        if settings.format == "delta":
            report = export_delta(root, settings.table, track)
        else:
            report = export_iceberg(root, settings.table, _catalog(settings), track)
    _print(report, settings)


def _catalog(settings: Settings) -> Path | None:
    return None if settings.catalog is None else local_path(settings.catalog, "--catalog")


def _write_weights(root: Root, settings: Settings) -> None:
    from ludic.interop.weights import export_weights  # imports torch, which the other formats do not need

    assert settings.out is not None
    report = export_weights(root, settings.out, step=settings.step, version=settings.version, model=settings.model)
    if settings.json:
        print_json({"format": settings.format, **asdict(report)})
    else:
        text = f"{report.location}: {report.source} as {plural(report.num_files, 'file')}, {size(report.size_bytes)}"
        stdout_console().print(printable(text), soft_wrap=True)


def _write_text(root: Root, settings: Settings) -> None:
    if settings.out is not None and local_path(settings.out, "--out").exists():
        raise ConfigError(f"{settings.out} exists; choose another --out, or delete it")
    if settings.sql is not None:
        with open_result([root], settings.sql, rows_a_batch=_ROWS_A_BATCH) as result:
            _write_rows(result.schema.names, _rows(result), settings)
    else:
        result = whole_rows(root, settings.table, _matching(root, settings))
        # Steps refer to messages for their texts; resolve the references for readers of text.
        _write_rows(result.schema.names, map(resolve_row, _rows(result)), settings)


def _matching(root: Root, settings: Settings) -> set[str] | None:
    """Return the ids of the rows that match --where; None means all rows."""
    if settings.where is None:
        return None
    # The predicate has its own lines, so that a comment at its end does not hide the parenthesis.
    query = f"select rollout_id from {settings.table} where (\n{settings.where}\n)"  # noqa: S608
    with open_result([root], query) as result:
        return {rollout_id for batch in result for rollout_id in batch.column("rollout_id").to_pylist()}


def _rows(result: pa.RecordBatchReader) -> Iterator[dict[str, Any]]:
    names = result.schema.names
    return (dict(zip(names, values, strict=True)) for values in plain_rows(result))


def _write_rows(names: Sequence[str], rows: Iterable[Mapping[str, Any]], settings: Settings) -> None:
    with open_sink(Path(settings.out) if settings.out else None) as sink:
        if settings.format == "jsonl":
            _write_jsonl(rows, sink)
        else:
            write_csv(names, (row.values() for row in rows), sink)


def _write_jsonl(rows: Iterable[Mapping[str, Any]], sink: BinaryIO) -> None:
    """Write one JSON object per line."""
    for row in rows:
        sink.write(json_text(row).encode() + b"\n")


def _print(report: TableReport, settings: Settings) -> None:
    if settings.json:
        print_json({"format": settings.format, **asdict(report)})
    else:
        changes = f"{plural(report.num_added, 'file')} added, {report.num_removed:,} removed"
        text = f"{report.location}: {settings.format} table of {plural(report.num_files, 'file')}; {changes}"
        stdout_console().print(printable(text), soft_wrap=True)
    for name, reason in report.left_out.items():
        print(printable(f"ludic: {name} was left out: {reason}"), file=sys.stderr)
