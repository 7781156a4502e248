"""Show results of operations as text, in a notebook, in a page or as JSON, and progress on stderr.

A result is a dataclass of figures. `parts` returns the parts that are shown, in order: sentences, facts and frames,
which are tables of rows. FORMATS has the titles and formats of columns in all outputs; other columns are formatted by
their values. Data of a run is always shown as text, never as markup or terminal escape codes, which a model could
write. rich is imported only when something is printed, so that `import ludic` stays fast.
"""

import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from html import escape
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any, Literal

from ludic.base.defaults import Track
from ludic.base.printable import printable
from ludic.base.row_files import json_text, to_plain
from ludic.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

SHOWN_ITEMS = 6
"""Number of items of a list that a cell shows."""

_NARROW = 8
"""Number of columns from which a table has narrower gaps."""
_BLOCKS = "▁▂▃▄▅▆▇█"
NOTEBOOK_COLUMNS = 100
_PRE = (
    # Jupyter would break lines within words.
    '<pre style="word-break:normal;line-height:normal;'
    'font-family:Menlo,Consolas,monospace;background:white;color:black">{code}</pre>'
)
_LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
"""Options of a console that prints text unchanged."""


# --- Results ---------------------------------------------------------------------------------------------------------


_RENAMED = {"troubles": "diagnostics", "looks": "probes"}
"""Attributes of results by their former name."""


class Result:
    """Base class of the results of operations. A subclass is a dataclass, and implements `parts`."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            now = _RENAMED.get(name)
            hint = f"; it is called {now!r} now" if now is not None and hasattr(type(self), now) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def parts(self) -> "Iterator[Part]":
        """Yield the parts that are shown, in order."""
        return iter(())

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, as --json prints them."""
        return asdict(self)  # type: ignore[call-overload]

    @property
    def remarks(self) -> Sequence[str]:
        """Lines that a command prints to stderr, beside its result."""
        return ()

    @property
    def is_out(self) -> bool:
        """True if the result is on stdout already, such as exported rows, so that a command prints nothing more
        there."""
        return False

    @property
    def failure(self) -> str | None:
        """Reason why a command with this result exits with 1; None for success."""
        return None

    def frame(self, name: str) -> "pl.DataFrame":
        """Return the rows of a frame with all of their columns. Raises ConfigError, which lists the names."""
        frames = {part.name: part for part in self.parts() if isinstance(part, Frame)}
        if name not in frames:
            raise ConfigError(unknown_name("frame", name, frames))
        return to_frame(frames[name].rows)

    def print_to(self, console: "Console") -> None:
        """Print for people."""
        for part in self.parts():
            print_part(console, part)

    def __repr__(self) -> str:
        file = io.StringIO()
        self.print_to(
            open_console(file=file, width=NOTEBOOK_COLUMNS, color_system=None, force_jupyter=False, **_LITERAL)
        )
        return "\n".join([*file.getvalue().rstrip("\n").splitlines(), *map(printable, self.remarks)])

    def _repr_html_(self) -> str:
        """Return the text as HTML; rich escapes every character of HTML in it."""

        def print_all(console: "Console") -> None:
            self.print_to(console)
            for remark in self.remarks:
                print_part(console, remark)

        return to_html(print_all)


def to_html(print_to: Callable[["Console"], None]) -> str:
    """Return what a function prints to a console as HTML for a notebook."""
    options: dict[str, Any] = {"width": NOTEBOOK_COLUMNS, "force_jupyter": False, "no_color": False, **_LITERAL}
    # The colour codes are not printed: they become HTML.
    options |= {"record": True, "force_terminal": True, "color_system": "truecolor"}
    console = open_console(file=io.StringIO(), **options)
    print_to(console)
    return console.export_html(inline_styles=True, code_format=_PRE)


@dataclass(frozen=True, slots=True)
class Frame:
    """A table of a result: rows by column name, of which some columns are shown."""

    name: str
    """Key of the frame in the result, and its heading if `has_heading`."""
    rows: Sequence[Mapping[str, Any]]
    shown: Sequence[str]
    """Columns that are shown."""
    most: int = 40
    """Maximum number of rows that are shown; --json has all."""
    has_heading: bool = False
    heading: str = ""
    """Heading that differs from the name."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Titles of columns that differ from those of FORMATS."""
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Derived columns for display, computed from a row."""

    def to_html(self) -> str:
        """Return the shown rows as an HTML table. All text is escaped; numbers have class n, long texts class text."""
        rows, columns = _seen(self)
        titles = "".join(f"<th{each.html_class}>{_escaped(each.title)}</th>" for each in columns.values())
        lines = [f"<tr>{''.join(each.html(row[name]) for name, each in columns.items())}</tr>" for row in rows]
        if len(self.rows) > self.most:
            lines.append(f'<tr><td colspan="{len(columns)}">… {len(self.rows):,} in all</td></tr>')
        return "\n".join(["<table>", f"<tr>{titles}</tr>", *lines, "</table>"])


@dataclass(frozen=True, slots=True)
class Sentence:
    """A line, with a prefix in its own style."""

    text: str
    mark: str = ""
    style: str = ""

    def __str__(self) -> str:
        return f"{self.mark}{self.text}"


Part = Frame | Sentence | Mapping[str, str] | str
"""Part of a result: a table, a line, or facts by title."""


def print_part(console: "Console", part: Part) -> None:
    """Print a part of a result."""
    from rich.text import Text

    if isinstance(part, str):
        part = Sentence(part)
    if isinstance(part, Sentence):
        mark = Text(printable(part.mark), style=part.style)
        console.print(
            mark.append(printable(part.text), "not bold not dim default")
            if part.mark
            else Text(printable(part.text), style=part.style),
            soft_wrap=True,
        )
    elif isinstance(part, Frame):
        _print_frame(console, part)
    else:
        console.print(pairs(part))


def _print_frame(console: "Console", frame: Frame) -> None:
    from rich.text import Text

    if frame.heading or frame.has_heading:
        console.print(Text(printable(frame.heading or frame.name), style="bold"))
    rows, columns = _seen(frame)
    marked = [f"{'>' if each.is_number else ''}{each.title}" for each in columns.values()]
    table = plain_table(*marked)
    table.collapse_padding = len(marked) >= _NARROW  # otherwise many columns need more than 80 characters
    for row in rows:
        table.add_row(*(each.text(row[name]) for name, each in columns.items()))
    console.print(table)
    if len(frame.rows) > frame.most:
        console.print(Text(f"… {len(frame.rows):,} in all", style="dim"))


def _seen(frame: Frame) -> tuple[list[dict[str, Any]], dict[str, "ColumnFormat"]]:
    """Return the rows that people see, with derived columns, and the formats of the columns that they see."""
    rows = [{**row, **{name: of(row) for name, of in frame.derived.items()}} for row in frame.rows[: frame.most]]
    formats = {name: column_format(name, (row[name] for row in rows)) for name in frame.shown}
    return rows, {name: replace(each, title=frame.titles.get(name, each.title)) for name, each in formats.items()}


def to_frame(rows: Sequence[Mapping[str, Any]]) -> "pl.DataFrame":
    """Return rows as a Polars DataFrame."""
    import polars as pl

    return pl.DataFrame(list(rows), infer_schema_length=None)


# --- Formats of columns ----------------------------------------------------------------------------------------------

ColumnKind = Literal[
    "text", "long", "count", "index", "number", "signed", "mean", "share", "bytes", "interval", "digest"
]


@dataclass(frozen=True, slots=True)
class ColumnFormat:
    """How a column is shown wherever it is."""

    title: str
    kind: ColumnKind = "text"
    """long: text of several lines; index: number of a thing, such as a step; mean: of counts, such as tokens."""
    digits: int = 4
    """Maximum significant digits of a number, decimal places of a share, characters of a digest."""
    most: int = 60
    """Maximum characters of a text in a cell."""

    @property
    def is_number(self) -> bool:
        return self.kind not in ("text", "long", "digest")

    @property
    def html_class(self) -> str:
        """Attribute of a cell in HTML."""
        return ' class="n"' if self.is_number else ' class="text"' if self.kind == "long" else ""

    def text(self, value: Any, most: int | None = None) -> "Text":
        """Return a value as one line. Without a value, a dash, or nothing for a count.

        most: characters of a text; None is those of the format.
        """
        from rich.text import Text

        most = self.most if most is None else most
        if value is None:
            return Text("" if self.kind in ("count", "bytes") else "-")
        if isinstance(value, str) and self.kind != "digest":  # also in a column of numbers: a root may hold anything
            return cell(value, most)
        match self.kind:
            case "count":
                return Text(f"{value:,}")
            case "number":
                return Text(number(value, self.digits))
            case "signed":
                return Text(f"{value:+.{self.digits}g}")
            case "mean":
                return Text(f"{value:,.1f}")
            case "interval" | "index":
                return Text(str(value))
            case "share":
                return Text(f"{value:.{self.digits}%}")
            case "bytes":
                return Text(size(value))
            case "digest":
                return cell(str(value)[: self.digits])
        return cell(value, most)

    def html(self, value: Any) -> str:
        """Return a value as a cell of an HTML table, escaped and in full."""
        is_long = self.kind == "long" and value is not None
        text = str(value) if is_long else self.text(value, most=sys.maxsize).plain
        return f"<td{self.html_class}>{_escaped(text)}</td>"


def _escaped(text: str) -> str:
    return escape(printable(text))


def column_format(name: str, values: Iterable[Any] = ()) -> ColumnFormat:
    """Return the format of a column: that of FORMATS, or one that follows from its first value that is not None."""
    if name in FORMATS:
        return FORMATS[name]
    value = next((each for each in values if each is not None), None)
    kind: ColumnKind = "text"
    if isinstance(value, float):
        kind = "number"
    elif isinstance(value, int) and not isinstance(value, bool):
        kind = "count"
    return ColumnFormat(name.removeprefix("num_").replace("_", " "), kind)


FORMATS: Mapping[str, ColumnFormat] = {
    "run": ColumnFormat("run", most=500),
    "env_name": ColumnFormat("env"),
    "env": ColumnFormat("env"),
    "env_example_id": ColumnFormat("example"),
    "agent_id": ColumnFormat("agent"),
    "group_id": ColumnFormat("group"),
    "rollout_id": ColumnFormat("rollout"),
    "policy_version": ColumnFormat("version", "index"),
    "version": ColumnFormat("version", "index"),
    "last_version": ColumnFormat("last version", "index"),
    "step": ColumnFormat("step", "index"),
    "error": ColumnFormat("error", "long"),
    "ended_by": ColumnFormat("end"),
    "episode_reward": ColumnFormat("reward", "number"),
    "accuracy": ColumnFormat("accuracy", "share", 1),
    "advantage": ColumnFormat("advantage", "signed"),
    "temperature": ColumnFormat("temperature", "number"),
    "estimate": ColumnFormat("mean", "number"),
    "std_error": ColumnFormat("error", "number", 3),
    "estimate_a": ColumnFormat("baseline", "number", 3),
    "estimate_b": ColumnFormat("side", "number", 3),
    "difference": ColumnFormat("diff.", "number", 3),
    "p_value": ColumnFormat("p", "number", 2),
    "p_holm": ColumnFormat("p (Holm)", "number", 2),
    "interval": ColumnFormat("interval", "interval"),
    "num_missing": ColumnFormat("left out", "count"),
    "left_out": ColumnFormat("left out", "count"),
    "share": ColumnFormat("share", "number"),
    "reward_mean": ColumnFormat("reward", "number"),
    "reward_min": ColumnFormat("lowest", "number"),
    "reward_max": ColumnFormat("highest", "number"),
    "reward_std": ColumnFormat("std", "number"),
    "value_mean": ColumnFormat("mean", "number"),
    "response_length": ColumnFormat("tokens", "count"),
    "response_length_mean": ColumnFormat("tokens", "mean"),
    "incomplete_fraction": ColumnFormat("max_tokens", "share", 1),
    "unparsed_fraction": ColumnFormat("unparsed", "share", 1),
    "other_limit_fraction": ColumnFormat("limits", "share", 1),
    "error_fraction": ColumnFormat("failed", "share", 1),
    "dropped_fraction": ColumnFormat("of all considered", "share", 1),
    "num_incomplete_completions": ColumnFormat("max_tokens", "count"),
    "num_unparsed": ColumnFormat("unparsed", "count"),
    "num_at_other_limits": ColumnFormat("limits", "count"),
    "num_errors": ColumnFormat("failed", "count"),
    "scorer_version": ColumnFormat("version", "digest", 12),
    "num_examples": ColumnFormat("examples", "count"),
    "num_files": ColumnFormat("files", "count"),
    "num_rollouts": ColumnFormat("rollouts", "count"),
    "num_rows": ColumnFormat("rows", "count"),
    "size_bytes": ColumnFormat("size", "bytes"),
    "needed_bytes": ColumnFormat("needs", "bytes"),
    "limit_bytes": ColumnFormat("has", "bytes"),
    "seconds": ColumnFormat("seconds", "number", 3),
    "num_files_before": ColumnFormat("files", "count"),
    "num_files_after": ColumnFormat("then", "count"),
    "size_bytes_before": ColumnFormat("bytes", "bytes"),
    "size_bytes_after": ColumnFormat("then", "bytes"),
}
"""Title and format of columns, by name. Other columns are formatted by their values."""


# --- Printing --------------------------------------------------------------------------------------------------------


def open_console(*, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> "Console":
    """Return a console on stdout, on stderr or on a file; no other code of ludic creates one.

    Escape codes and moving bars are only for streams that report themselves as terminals. rich also obeys FORCE_COLOR,
    CLICOLOR_FORCE and TTY_COMPATIBLE, which a notebook's kernel sets for every process that it starts, and CI for all
    its steps: their log files would be full of spinner frames. options: of rich.console.Console.
    """
    from rich.console import Console

    stream = file or (sys.stderr if stderr else sys.stdout)
    terminal: dict[str, Any] = {} if _is_terminal(stream) else {"force_terminal": False}
    return Console(stderr=stderr, file=file, **{**terminal, **options})


def _is_terminal(stream: IO[str] | None) -> bool:
    """Return whether a stream is a terminal; None is a stream that was closed before Python started."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def can_draw(console: "Console") -> bool:
    """Return whether bars and panels may move on a console: a terminal or a notebook."""
    return console.is_terminal or console.is_jupyter


def stdout_console() -> "Console":
    """Return a console for results. It prints text literally, and colours only on terminals, without NO_COLOR."""
    return open_console(**_LITERAL)


@contextmanager
def progress_bar() -> Iterator[Track]:
    """Show a progress bar on stderr, removed at the end; shows nothing if stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = open_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not can_draw(console)) as progress:
        yield lambda items, total, description: progress.track(items, total=total, description=description)


def print_json(value: Any) -> None:
    """Print one JSON document to stdout."""
    sys.stdout.write(f"{json_text(to_plain(value), indent=2)}\n")


def cell(value: Any, most: int = 60) -> "Text":
    """Return a value as one line of at most `most` characters, with the first items of lists and maps."""
    from rich.text import Text

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


TOO_FEW = "too few examples"
"""Text instead of an interval or a power that would be wrong for too few examples."""
NOT_ESTIMATED = "cannot be estimated"
"""Text instead of an interval or a power that stored values do not determine."""


def number(value: float | None, digits: int = 6) -> str:
    """Format a number with at most `digits` significant digits; None becomes a dash."""
    return "-" if value is None else f"{value:.{digits}g}"


def plain_table(*titles: str) -> "Table":
    """Return an empty table without a frame. A title that begins with > right-aligns its column, for numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(Text(printable(title.removeprefix(">"))), justify="right" if title[:1] == ">" else "left")
    return table


def pairs(values: Mapping[str, str]) -> "Table":
    """Return a table of names and their values, one line each."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(Text(printable(name), style="bold"), Text(printable(value), overflow="fold"))
    return table


def of_total(count: int, total: int | None) -> str:
    """Format a count with its total, if that is known: 3 of 10, or 3."""
    return f"{count:,}" if total is None else f"{count:,} of {total:,}"


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
    """Format seconds in the largest unit, from s to days, that gives at least 2."""
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
