"""`ludic sql ROOT [ROOT ...] "SELECT ..."`: run a query over one or several runs; print a table, JSON, CSV or Parquet.

A table is for people and shows the first rows; the other formats stream the whole result to stdout or a file.
Raises QueryError with DuckDB's reason, ConfigError if a file can't be written.
"""

import io
import sys
from typing import Any, BinaryIO, cast

from rich.console import Console

import ludic
from ludic.cli.flags.sql import Settings
from ludic.errors import ConfigError
from ludic.printable import printable
from ludic.viewer.output import stdout_console
from ludic.viewer.row_files import open_sink, write_result
from ludic.viewer.tables import print_table


def main(settings: Settings) -> None:
    if settings.chosen_format == "parquet" and settings.out is None and sys.stdout.isatty():
        raise ConfigError("Parquet is not for a terminal; add --out FILE.parquet, or pipe it")
    run = ludic.open(settings.root)
    with (
        run.sql_stream(settings.query, also=settings.also, unsafe=settings.unsafe) as result,
        open_sink(settings.out) as sink,
    ):
        if settings.chosen_format == "table":
            text = io.TextIOWrapper(sink, encoding="utf-8", write_through=True) if settings.out else None
            print_table(result, Console(file=text, width=200) if text else stdout_console(), settings.max_rows)
        else:
            is_shown = settings.out is None and sys.stdout.isatty()
            write_result(result, settings.chosen_format, cast(BinaryIO, _Printable(sink)) if is_shown else sink)


class _Printable(io.RawIOBase):
    """The terminal, which must not obey control characters in the data; a file or a pipe gets them as they are."""

    def __init__(self, terminal: BinaryIO) -> None:
        self._terminal = terminal

    def write(self, text: Any) -> int:
        # \r is a control character too, and no line that ludic writes ends with one.
        return self._terminal.write(printable(bytes(text).decode()).encode())
