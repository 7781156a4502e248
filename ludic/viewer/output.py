"""Output for people: tables and JSON on stdout, progress on stderr, HTML in a notebook.

Data of a run is always shown as text, never as markup or terminal escape codes, which a model could write.
"""

import io
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ludic.printable import printable as printable
from ludic.store.root import Track
from ludic.viewer.row_files import json_text, to_plain

SHOWN_ITEMS = 6
"""Number of items of a list that a cell shows."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTEBOOK_COLUMNS = 100
_PRE = (
    # Jupyter would break lines within words.
    '<pre style="word-break:normal;line-height:normal;'
    'font-family:Menlo,Consolas,monospace;background:white;color:black">{code}</pre>'
)
_LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
"""Options of a console that prints text as it is."""


class Shown:
    """Base of results that print as text, and as coloured text in a notebook; a subclass writes `print_to`."""

    __slots__ = ()

    def print_to(self, console: Console) -> None:
        """Print for people."""
        raise NotImplementedError

    def __repr__(self) -> str:
        file = io.StringIO()
        self.print_to(Console(file=file, width=_NOTEBOOK_COLUMNS, color_system=None, force_jupyter=False, **_LITERAL))
        return file.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the text as HTML; rich escapes every character of HTML in it."""
        options: dict[str, Any] = {"width": _NOTEBOOK_COLUMNS, "force_jupyter": False, "no_color": False, **_LITERAL}
        console = Console(record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", **options)
        self.print_to(console)
        return console.export_html(inline_styles=True, code_format=_PRE)


def stdout_console() -> Console:
    """Return a console for results. It prints text literally, and colours only on terminals, without NO_COLOR."""
    return Console(**_LITERAL)


@contextmanager
def progress_bar() -> Iterator[Track]:
    """Show a progress bar on stderr, removed at the end; shows nothing if stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield lambda items, total, description: progress.track(items, total=total, description=description)


def print_json(value: Any) -> None:
    """Print one JSON document to stdout."""
    sys.stdout.write(f"{json_text(to_plain(value), indent=2)}\n")


def cell(value: Any, most: int = 60) -> Text:
    """Return a value as one line of at most `most` characters, with the first items of lists and maps."""
    if value is None:
        return Text("null", style="dim")
    shown = printable(_in_short(value).replace("\n", "\\n"))
    return Text(shown if len(shown) <= most else f"{shown[: most - 1]}…")


def _in_short(value: Any) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case float() | Decimal():
            return number(float(value))
        case datetime():
            return f"{value:%Y-%m-%d %H:%M:%S}"
        case Mapping():
            return f"{{{_items([f'{key}: {_in_short(item)}' for key, item in value.items()])}}}"
        case list() | tuple():
            return f"[{_items([_in_short(item) for item in value[:SHOWN_ITEMS]], len(value))}]"
    return str(value)


def _items(texts: Sequence[str], total: int | None = None) -> str:
    total = len(texts) if total is None else total
    more = [f"… {total} in all"] if total > SHOWN_ITEMS else []
    return ", ".join([*texts[:SHOWN_ITEMS], *more])


NOT_ESTIMATED = "cannot be estimated"
"""In place of an interval or a power that stored values say nothing about."""


def number(value: float | None, digits: int = 6) -> str:
    """Format a number with at most `digits` significant digits; None becomes a dash."""
    return "-" if value is None else f"{value:.{digits}g}"


def plain_table(*titles: str) -> Table:
    """Return an empty table without a frame. A title that begins with > right-aligns its column, for numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(Text(printable(title.removeprefix(">"))), justify="right" if title[:1] == ">" else "left")
    return table


def pairs(values: Mapping[str, str]) -> Table:
    """Return a table of names and their values, one line each."""
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(Text(printable(name), style="bold"), Text(printable(value), overflow="fold"))
    return table


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: 1 turn, 2 turns."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size(num_bytes: float) -> str:
    """Format a number of bytes: 1,234 B, 12.3 kB, 45.6 MB, ..."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 10_000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"


def age(seconds: float) -> str:
    """Format seconds in the largest unit, from s to days, of which there are two or more."""
    for unit, size_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most `width` blocks of eight heights; each block is a mean."""
    if not values:
        return ""
    num_bins = min(width, len(values))
    edges = [round(index * len(values) / num_bins) for index in range(num_bins + 1)]
    means = [fmean(values[start:stop]) for start, stop in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
