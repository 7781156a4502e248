"""The panel's tables of environments and workers, or lines if the terminal is too narrow for tables. Pure."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ludic.results import age, number, printable
from ludic.show.status import WINDOW, Row, RunStatus

_MOST_WORKERS = 8
_GAPS = (2, 1)
"""Spaces between two columns: the wider gap if it fits."""
_SHORTEST_ID = 9
"""Characters of a worker's id that distinguish it from others; the rest may be cut."""
_COUNTS = {
    "truncated": "num_truncated",
    "incomplete": "num_incomplete_completions",
    "unparsed": "num_parse_errors",
    "failed": "num_errors",
}


def by_environment(status: RunStatus, width: int) -> RenderableType:
    """Return rates and means of each environment's newest rollouts. width: in columns."""
    rows = {}
    for env_name, calls in _grouped(status.calls, "env_name").items():
        num_rollouts = sum(row["num_rollouts"] for row in calls)
        rows[env_name] = {
            "rollouts/min": f"{rates(calls, status.at)['num_rollouts']:,.0f}",
            "reward": number(_weighted(calls, "reward_mean"), 4),
            "tokens": number(_weighted(calls, "response_length_mean"), 4),
            **{title: _fraction(calls, column, num_rollouts) for title, column in _COUNTS.items()},
        }
    return _table("environment", rows, width, name_width=max(map(len, map(printable, rows))))


def by_worker(status: RunStatus, width: int) -> RenderableType:
    """Return rates of each worker, at most the first 8. width: in columns."""
    rows = {}
    workers = _grouped(status.calls, "worker_id")
    for worker_id, calls in itertools.islice(workers.items(), _MOST_WORKERS):
        of_worker, busy_s = rates(calls, status.at), sum(row["step_s"] or 0.0 for row in calls)
        wait_s = sum(row["wait_s"] or 0.0 for row in calls)
        rows[worker_id] = {
            "rollouts/min": f"{of_worker['num_rollouts']:,.0f}",
            "tokens/s": f"{of_worker['num_tokens'] / 60:,.0f}",
            "version": str(calls[-1]["policy_version"]),
            "waiting": f"{wait_s / (wait_s + busy_s):.0%}" if wait_s + busy_s else "-",
            "last heard": f"{age(_seconds_since(calls[-1], status.at))} ago",
        }
    table = _table("worker", rows, width, name_width=_SHORTEST_ID)
    if len(workers) <= _MOST_WORKERS:
        return table
    return Group(table, Text(f"and {len(workers) - _MOST_WORKERS:,} more", style="dim"))


def rates(calls: Sequence[Row], at: datetime) -> dict[str, float]:
    """Return num_rollouts and num_tokens per minute, since the begin of the first call or over WINDOW, if shorter."""
    if not calls:
        return {"num_rollouts": 0.0, "num_tokens": 0.0}
    first_s = _seconds_since(calls[0], at) + (calls[0]["step_s"] or 0.0)
    minutes = min(max(first_s, 1.0), WINDOW.total_seconds()) / 60
    return {name: sum(row[name] for row in calls) / minutes for name in ("num_rollouts", "num_tokens")}


def _table(title: str, rows: Mapping[str, Mapping[str, str]], width: int, *, name_width: int) -> RenderableType:
    """Return a table of names and numbers, or lines if the numbers do not fit beside `name_width` columns of a name.

    rows: by name, values by title.
    """
    titles = list(next(iter(rows.values())))
    numbers = [max(len(title), *(len(row[title]) for row in rows.values())) for title in titles]
    fitting = [gap for gap in _GAPS if sum(numbers) + gap * len(numbers) + name_width <= width]
    if not fitting:
        return Group(*(line for name, row in rows.items() for line in _lines(name, row, width)))
    table = Table(box=None, pad_edge=False, padding=(0, fitting[0], 0, 0), header_style="bold")
    table.add_column(title)
    for each in titles:
        table.add_column(each, justify="right", no_wrap=True)  # so that names are cut, not numbers
    for name, row in rows.items():
        table.add_row(_name(name), *row.values())
    return table


def _lines(name: str, row: Mapping[str, str], width: int) -> list[Text]:
    """Return a name and the lines of its values below it; no line break between a value and its title."""
    lines = [_name(name, "bold")]
    words = ""
    for title, value in row.items():
        added = f"{words}, {title} {value}" if words else f"  {title} {value}"
        if words and len(added) + 1 > width:
            lines.append(Text(f"{words},"))
            added = f"  {title} {value}"
        words = added
    return [*lines, Text(words)]


def _name(name: str, style: str = "") -> Text:
    return Text(printable(name), no_wrap=True, overflow="ellipsis", style=style)


def _grouped(rows: Iterable[Row], column: str) -> dict[str, list[Row]]:
    """Group rows by the value of a column, sorted by it."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[column]].append(row)
    return dict(sorted(groups.items()))


def _seconds_since(row: Row, at: datetime) -> float:
    """Return the seconds since a row was written, at least 0: the writer's clock may differ from ours."""
    return max(0.0, (at - row["created_at"]).total_seconds())


def _weighted(calls: Sequence[Row], column: str) -> float | None:
    """Return the mean over rollouts of the calls whose column is not null; None if there are none."""
    known = [row for row in calls if row[column] is not None]
    num_rollouts = sum(row["num_rollouts"] for row in known)
    return sum(row[column] * row["num_rollouts"] for row in known) / num_rollouts if num_rollouts else None


def _fraction(calls: Sequence[Row], column: str, num_rollouts: int) -> str:
    """Return a count as a percentage of rollouts; a dash if a worker of an older version did not store it."""
    if not num_rollouts or any(row[column] is None for row in calls):
        return "-"
    return f"{sum(row[column] for row in calls) / num_rollouts:.1%}"
