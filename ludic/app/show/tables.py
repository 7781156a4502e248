"""Write the result of a query as JSON, CSV or Parquet, or its first rows as a table.

A row of a table is one line, or, if it is too wide, one line per column. Raises ConfigError if the output can't be
written.
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ludic.base import cell, open_console, open_sink, pairs, stdout_console, write_result
from ludic.base.results import printable
from ludic.errors import ConfigError

_NARROWEST = 16
"""Minimum width of a column; a table that would need narrower columns is printed row by row."""


def write_rows(result: pa.RecordBatchReader, format: str, out: Path | None, max_rows: int) -> None:
    """Write rows to a file, or to stdout if `out` is None. format: table, json, csv or parquet. Raises ConfigError."""
    is_shown = out is None and sys.stdout.isatty()
    if format == "parquet" and is_shown:
        raise ConfigError("Parquet is not for a terminal; add --out FILE.parquet, or pipe it")
    with open_sink(out) as sink:
        if format == "table":
            text = io.TextIOWrapper(sink, encoding="utf-8", write_through=True) if out else None
            print_table(result, open_console(file=text, width=200) if text else stdout_console(), max_rows)
        else:
            write_result(result, format, cast(BinaryIO, _Printable(sink)) if is_shown else sink)


class _Printable(io.RawIOBase):
    """Output for a terminal, which must not obey control characters in the data; a file or a pipe gets them
    unchanged."""

    def __init__(self, terminal: BinaryIO) -> None:
        self._terminal = terminal

    def write(self, text: Any) -> int:
        # \\r is a control character too, and no line that ludic writes ends with one.
        return self._terminal.write(printable(bytes(text).decode()).encode())


def print_table(result: pa.RecordBatchReader, console: Console, max_rows: int) -> None:
    """Print the first rows and the number of all rows; row by row if the columns do not fit side by side."""
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
    columns = [max([len(name), *(len(cell(row[index])) for row in rows)]) for index, name in enumerate(names)]
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
    for index, row in enumerate(rows):
        console.rule(f"row {index + 1}", align="left", style="dim")
        console.print(pairs({name: cell(value, most=200).plain for name, value in zip(names, row, strict=True)}))
