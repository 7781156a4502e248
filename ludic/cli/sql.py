"""`ludic sql ROOT [ROOT ...] "SELECT ..."`: run a query over one or several runs; print a table, JSON, CSV or Parquet.

A table is for people and shows the first rows; the other formats stream the whole result to stdout or a file.
Raises QueryError with DuckDB's reason, ConfigError if a file can't be written.
"""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ludic.cli.flags.sql import Settings
from ludic.cli.query import explain, interrupted_by_ctrl_c
from ludic.errors import ConfigError, QueryError, one_line
from ludic.sql import connect
from ludic.sql.connect import check_only_reads
from ludic.store import Root
from ludic.viewer.output import cell, json_text, pairs, printable, stdout_console, to_plain

_ROWS_A_BATCH = 10_000
_UNSAFE = "`--unsafe` allows it; use it only for a query that you trust"
_SEALED = re.compile(r"disabled (by|through) configuration|configuration has been locked")
_BYTES_AT_ONCE = 4 << 20
# Minimum width of a column; a table that would need narrower columns is shown row by row.
_NARROWEST = 16


def main(settings: Settings) -> None:
    if settings.chosen_format == "parquet" and settings.out is None and sys.stdout.isatty():
        raise ConfigError("Parquet is not for a terminal; add --out FILE.parquet, or pipe it")
    roots = [Root.open(url) for url in (settings.root, *settings.also)]
    with open_result(roots, settings.query, unsafe=settings.unsafe) as result, open_sink(settings.out) as sink:
        if settings.chosen_format == "table":
            text = io.TextIOWrapper(sink, encoding="utf-8", write_through=True) if settings.out else None
            print_table(result, Console(file=text, width=200) if text else stdout_console(), settings.max_rows)
        else:
            _WRITERS[settings.chosen_format](result, sink)


@contextmanager
def open_result(
    roots: Sequence[Root], query: str, *, rows_a_batch: int = _ROWS_A_BATCH, unsafe: bool = False
) -> Iterator[pa.RecordBatchReader]:
    """Give the result as a stream, open until the block ends. Raises QueryError, also if reading the stream fails.

    unsafe: let the query use files outside of the runs.
    """
    if not query.strip():
        raise QueryError('the query is empty, wanted SQL such as "select count(*) from rollouts"')
    con = connect(roots, sealed=not unsafe)
    try:
        with interrupted_by_ctrl_c(con):
            if not unsafe:
                _check_only_reads(con, query)
            relation = con.sql(query)
            if relation is None:
                yield pa.table({}).to_reader()
            else:
                yield _with_unique_names(relation.to_arrow_reader(rows_a_batch))
    except (duckdb.PermissionException, duckdb.InvalidInputException) as error:
        if not _SEALED.search(str(error)):
            raise QueryError(explain(error, *roots)) from error
        raise QueryError(
            f"the query reaches outside of {' and '.join(root.url for root in roots)}: {one_line(error)}; {_UNSAFE}"
        ) from error
    except (duckdb.Error, pa.ArrowException) as error:
        raise QueryError(explain(error, *roots)) from error


def _check_only_reads(con: duckdb.DuckDBPyConnection, query: str) -> None:
    try:
        check_only_reads(con, query)
    except QueryError as error:
        raise QueryError(f"{error}; `ludic sql --out FILE` saves a result; {_UNSAFE}") from None


def _with_unique_names(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Rename columns of equal names, which SQL allows and JSON and Parquet do not, to a, a_1, ..."""
    names: list[str] = []
    for name in reader.schema.names:
        candidate, place = name, 0
        while candidate in names:
            place += 1
            candidate = f"{name}_{place}"
        names.append(candidate)
    if names == reader.schema.names:
        return reader
    schema = pa.schema([field.with_name(name) for field, name in zip(reader.schema, names, strict=True)])
    return pa.RecordBatchReader.from_batches(schema, (batch.rename_columns(names) for batch in reader))


@contextmanager
def open_sink(path: Path | None) -> Iterator[BinaryIO]:
    """Give stdout, or a file that appears once it is complete. Raises ConfigError if it can't be written."""
    if path is None:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # the folder may be a file, or be read-only
            partial.unlink(missing_ok=True)


def _write_json(result: pa.RecordBatchReader, sink: BinaryIO) -> None:
    """Write one JSON array with an object per row."""
    before = b"[\n"
    for row in plain_rows(result):
        sink.write(before + json_text(dict(zip(result.schema.names, row, strict=True))).encode())
        before = b",\n"
    sink.write(b"\n]\n" if before == b",\n" else b"[]\n")


def _write_csv(result: pa.RecordBatchReader, sink: BinaryIO) -> None:
    write_csv(result.schema.names, plain_rows(result), sink)


def write_csv(names: Sequence[str], rows: Iterable[Iterable[Any]], sink: BinaryIO) -> None:
    """Write a header and one line per row of plain values; null is empty, and lists and maps are JSON text."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([value if isinstance(value, str | None) else json.dumps(value) for value in row])
        sink.write(buffer.getvalue().encode())
        buffer.seek(0)
        buffer.truncate()
    sink.write(buffer.getvalue().encode())


def _write_parquet(result: pa.RecordBatchReader, sink: BinaryIO) -> None:
    with pq.ParquetWriter(sink, result.schema, compression="zstd") as writer:
        for batch in result:
            writer.write_batch(batch)


_WRITERS: dict[str, Callable[[pa.RecordBatchReader, BinaryIO], None]] = {
    "json": _write_json,
    "csv": _write_csv,
    "parquet": _write_parquet,
}


def plain_rows(result: pa.RecordBatchReader) -> Iterator[list[Any]]:
    """Yield rows of values that JSON can represent."""
    for batch in result:
        # Numbers take up to ten times as much memory as Python objects as they take in Arrow.
        num_rows = max(1, _BYTES_AT_ONCE * batch.num_rows // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, num_rows):
            columns = batch.slice(start, num_rows).columns
            for row in zip(*(column.to_pylist(maps_as_pydicts="lossy") for column in columns), strict=True):
                yield [to_plain(value) for value in row]


def print_table(result: pa.RecordBatchReader, console: Console, max_rows: int) -> None:
    """Print the first rows and the number of all; row by row if the columns do not fit side by side."""
    first, num_rows = _take_first(result, max_rows)
    rows = [list(row.values()) for row in first.to_pylist(maps_as_pydicts="lossy")]
    if not result.schema.names:
        return
    width = console.width if console.is_terminal else sys.maxsize
    if _narrowest_width(result.schema.names, rows) <= width:
        _print_side_by_side(console, result.schema, rows)
    else:
        _print_row_by_row(console, result.schema.names, rows)
    if num_rows > len(rows):
        console.print(f"{len(rows)} of {num_rows:,} rows; --max-rows shows more, --format csv, json or parquet all")


def _take_first(result: pa.RecordBatchReader, max_rows: int) -> tuple[pa.Table, int]:
    """Return the first rows, and the number of all rows."""
    first, num_rows = [], 0
    for batch in result:
        if num_rows < max_rows:  # a slice without rows would keep the whole batch in memory
            first.append(batch.slice(0, max_rows - num_rows))
        num_rows += batch.num_rows
    return pa.Table.from_batches(first, result.schema), num_rows


def _narrowest_width(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> int:
    columns = [max([len(name), *(len(cell(row[place])) for row in rows)]) for place, name in enumerate(names)]
    return sum(min(column, _NARROWEST) + 2 for column in columns)


def _print_side_by_side(console: Console, schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for field in schema:
        is_number = (
            pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
        )
        table.add_column(
            Text(printable(field.name)), justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        table.add_row(*map(cell, row))
    if not console.is_terminal:
        console.width = max(80, console.measure(table, options=console.options.update(max_width=100_000)).maximum)
    console.print(table)


def _print_row_by_row(console: Console, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    for place, row in enumerate(rows):
        console.rule(f"row {place + 1}", align="left", style="dim")
        console.print(pairs({name: cell(value, most=200).plain for name, value in zip(names, row, strict=True)}))
