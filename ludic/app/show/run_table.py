"""Show the runs below a folder as a table, once or live, with each branch below the run that it left."""

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.app.show.runs import RunSummary, differing, differing_code, find_runs, setting_text, summarise
from ludic.base import Frame, Part, Result, age, column_format, is_url, of_total, open_console
from ludic.base.results import print_part, printable
from ludic.errors import LudicError, one_line

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console

_ASCENDING = {"name": "label", "began": "began_at", "state": "state"}
"""Fields that sort upwards; figures sort downwards, the best first."""
_SHOWN = ("run", "state", "step", "reward", "warning", "time", "tokens", "began")
_FIRST = ("run", "state", "step", "reward", "warning")
"""Columns that a narrow terminal shows before the settings; the others come after them."""
_CODE = "code"
"""Column of the code in which the runs differ, such as a reward function; none if they do not."""
_MOST = 2**63
"""Numbers of a frame are smaller."""
_GAP = 3
"""Spaces between two columns."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunTable(Result):
    """The runs below a folder; a branch comes after the run that it left, indented."""

    folder: str
    runs: Sequence[RunSummary]
    depths: Sequence[int] = ()
    """For each run, of how many others it is a branch."""
    is_out: bool = False
    """Whether it was printed already."""

    @property
    def differing(self) -> list[str]:
        """Names of the settings in which the runs differ."""
        return differing(self.runs)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures of the runs, and the settings in which they differ."""
        return {"folder": self.folder, "differing": self.differing, "runs": list(map(asdict, self.runs))}

    def frame(self, name: str = "runs") -> "pl.DataFrame":
        """Return a row for each run: its figures, and the settings in which the runs differ."""
        return Result.frame(self, name)

    def parts(self) -> Iterator[Part]:
        """The table, and a line for each problem."""
        yield from self._parts(sys.maxsize)

    def print_to(self, console: "Console") -> None:
        """Print the columns that fit side by side, and the names of the others."""
        for part in self._parts(console.width):
            print_part(console, part)

    def _parts(self, width: int) -> Iterator[Part]:
        if not self.runs:
            yield f"{self.folder} holds no run, and neither do the folders below it; `ludic run` starts one"
            return
        names = self.differing
        columns = self._columns(names)
        depths = dict(zip((each.url for each in self.runs), self.depths, strict=False))
        texts = {column: partial(_in_a_cell, name=column) for column in columns.values()}
        code = differing_code(self.runs)
        figures = [name for name in _SHOWN if name != "warning" or any(each.warning for each in self.runs)]
        more = [*([_CODE] if code else []), *columns.values()]
        frame = Frame(
            "runs",
            self._rows(columns, code),
            (*figures, *more),
            most=len(self.runs),
            titles={column: name for name, column in columns.items()},
            derived={**_DERIVED, **texts, "run": partial(_indented, depths=depths)},
        )
        shown = _fitting(frame, [*(name for name in _FIRST if name in figures), *more, *figures], width)
        yield replace(frame, shown=[column for column in frame.shown if column in shown])
        if rest := [frame.titles.get(column, column) for column in frame.shown if column not in shown]:
            yield f"no room for {', '.join(rest)}; a wider terminal or --json shows them"
        for each in self.runs:
            if each.problem:
                yield f"{each.label}: {each.problem}"

    def _columns(self, names: Sequence[str]) -> dict[str, str]:
        """Return the column of each setting: its name, unless a figure has it."""
        taken = {*_FIGURES, *_SHOWN, _CODE}
        return {name: f"settings.{name}" if name in taken else name for name in names}

    def _rows(self, columns: Mapping[str, str], code: Sequence[str]) -> list[dict[str, Any]]:
        values = {column: self._values(name) for name, column in columns.items()}
        return [
            {
                **{name: getattr(each, field) for name, field in _FIGURES.items()},
                **({_CODE: ", ".join(each.code[name] for name in code if name in each.code) or None} if code else {}),
                **{column: of_runs[index] for column, of_runs in values.items()},
            }
            for index, each in enumerate(self.runs)
        ]

    def _values(self, name: str) -> list[Any]:
        """Return the values of a setting; as texts unless all of them are numbers, or all are switches."""
        values = [each.settings.get(name) for each in self.runs]
        kinds = {type(value) for value in values if value is not None}
        is_small = all(abs(value) < _MOST for value in values if isinstance(value, int))
        if (kinds <= {int, float} and is_small) or kinds == {bool}:
            return [float(value) if float in kinds and value is not None else value for value in values]
        return [
            None if value is None else setting_text(each, name) for each, value in zip(self.runs, values, strict=True)
        ]


_FIGURES = {
    "run": "label",
    "state": "state",
    "step": "step",
    "num_steps": "num_steps",
    "reward": "reward",
    "tokens": "tokens",
    "is_tokens_estimated": "is_tokens_estimated",
    "seconds": "seconds",
    "began_at": "began_at",
    "parent": "parent",
    "warning": "warning",
    "problem": "problem",
    "run_id": "run_id",
    "url": "url",
}
"""Fields of a summary by the columns of the table."""


def _indented(row: Mapping[str, Any], *, depths: Mapping[str, int]) -> str:
    return f"{'  ' * depths.get(row['url'], 0)}{row['run']}"


def _in_a_cell(row: Mapping[str, Any], *, name: str) -> Any:
    return "-" if row[name] is None else row[name]


def _fitting(frame: Frame, columns: Iterable[str], width: int) -> list[str]:
    """Return the columns that fit into a width together, the first ones first, and the first in any case."""
    rows = [{**row, **{name: of(row) for name, of in frame.derived.items()}} for row in frame.rows]
    shown: list[str] = []
    for column in dict.fromkeys(columns):
        format_ = column_format(column, (row[column] for row in rows))
        title = frame.titles.get(column, format_.title)
        needed = max(len(title), *(format_.text(row[column]).cell_len for row in rows)) + (_GAP if shown else 0)
        if not shown or needed <= width:
            width -= needed
            shown.append(column)
    return shown


def _step(row: Mapping[str, Any]) -> str:
    return of_total(row["step"], row["num_steps"])


def _tokens(row: Mapping[str, Any]) -> str:
    return "" if row["tokens"] is None else f"{'~' if row['is_tokens_estimated'] else ''}{row['tokens']:,}"


_DERIVED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "step": _step,
    "tokens": _tokens,
    "warning": lambda row: row["warning"].partition(" in ")[0],
    "time": lambda row: "" if row["seconds"] is None else age(row["seconds"]),
    "began": lambda row: "" if row["began_at"] is None else f"{_age_of(row['began_at'])} ago",
}


def _age_of(since: datetime) -> str:
    return age(max(0.0, (datetime.now(UTC) - since).total_seconds()))


def tabulate(location: str | os.PathLike[str], sort: str = "name") -> RunTable:
    """Return the table of the runs at a folder or below it. Raises as `find_runs` does.

    sort: name, began, or a figure's field of RunSummary.
    """
    folder = os.fspath(location)
    found = summarise(find_runs(folder), folder)
    runs, depths = _with_branches(_sorted(found, sort))
    return RunTable(folder=folder, runs=runs, depths=depths)


def _sorted(runs: Sequence[RunSummary], sort: str) -> list[RunSummary]:
    name = _ASCENDING.get(sort, sort)
    having = [each for each in runs if getattr(each, name) is not None]
    without = [each for each in runs if getattr(each, name) is None]
    return [*sorted(having, key=lambda each: getattr(each, name), reverse=sort not in _ASCENDING), *without]


def _with_branches(runs: Sequence[RunSummary]) -> tuple[list[RunSummary], list[int]]:
    """Return the runs with each branch after the run that it left, and for each run of how many it is a branch."""
    paths = {_path(each.url): each.url for each in runs}
    below: dict[str | None, list[RunSummary]] = {}
    for each in runs:
        parent = None if each.parent is None else _run_at(each.parent, paths)
        below.setdefault(parent if parent != each.url else None, []).append(each)
    ordered: list[RunSummary] = []
    depths: list[int] = []
    pending = [(each, 0) for each in reversed(below.pop(None, []))]
    while pending:
        run, depth = pending.pop()
        ordered.append(run)
        depths.append(depth)
        pending += [(each, depth + 1) for each in reversed(below.pop(run.url, []))]
    rest = [each for of_parent in below.values() for each in of_parent]  # damaged: each is a branch of another
    return [*ordered, *rest], [*depths, *(0 for _ in rest)]


def _path(url: str) -> str:
    return url if is_url(url) else str(Path(url).absolute())


def _run_at(place: str, paths: Mapping[str, str]) -> str | None:
    """Return the run at a place that was typed in any working folder; None if it is not, or not clearly, one of these.

    paths: URL of each run by its whole path.
    """
    if (path := _path(place)) in paths:
        return paths[path]
    ends = [url for path, url in paths.items() if not place.startswith("/") and path.endswith(f"/{Path(place)}")]
    return ends[0] if len(ends) == 1 else None


def watch_runs(folder: str, console: "Console", interval_s: float) -> RunTable:
    """Print the table of the runs until Ctrl-C, live in a terminal, else once per update; return the newest one.

    Reads for at most a third of the time. While the filesystem fails, the last table stays, with the reason below it.
    """
    from rich.live import Live
    from rich.text import Text

    table, problem = tabulate(folder), ""
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with suppress(KeyboardInterrupt), live or nullcontext():
        while True:
            if live is not None:
                live.update(Text(f"{_shortened(table, console)}{problem}"), refresh=True)
            else:
                table.print_to(console)
                print_part(console, problem)
            since = time.monotonic()
            try:
                table, problem = tabulate(folder), ""
            except LudicError as error:
                problem = printable(f"looking again: {one_line(error)}")
            took_s = time.monotonic() - since
            time.sleep(max(interval_s, 2 * took_s))
    return replace(table, is_out=True)


_LINES_ASIDE = 6
"""Lines of a terminal that the rows of a live table do not take."""
_LIVELY = ("training", "new", "failed", "unreadable", "recorded", "stopped", "finished")


def _shortened(table: RunTable, console: "Console") -> str:
    """Return a table as text; if the terminal has too few lines, the first runs by state, and the number of others."""
    most, file = max(1, console.height - _LINES_ASIDE), io.StringIO()
    shown = table
    if len(table.runs) > most:
        shown = replace(table, runs=sorted(table.runs, key=lambda each: _LIVELY.index(each.state))[:most], depths=())
    shown.print_to(open_console(file=file, width=console.width, color_system=None, highlight=False, markup=False))
    more = len(table.runs) - len(shown.runs)
    return file.getvalue() + (f"and {more:,} more: `ludic runs` lists all" if more else "")
