"""Render several runs as one HTML file: their curves over each other, what differs, and their comparison.

The page has the policy of the report of one run (ludic/app/show/report/page.py), and the same style. Raises ConfigError
for fewer than two runs, an unknown setting, and an output that exists or can't be written; QueryError.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import duckdb

from ludic.app.show.comparison import Runs, open_runs
from ludic.app.show.evaluations import Comparison, compare_whole_runs
from ludic.app.show.figures import FigureData, overlays, read_diagnostics, read_figures
from ludic.app.show.report.page import STATE_CLASSES, Report, about_page, render, split_place, write_page
from ludic.app.show.report.plots import draw, style
from ludic.app.show.runs import RunSummary, lines_of, setting_text
from ludic.base import Frame, Sentence, number, of_total
from ludic.eval import MeasureConfig
from ludic.root import Root
from ludic.root.sql import Connections

_MOST_SETTINGS = 4
"""Number of settings, of those that differ, with a column in the table of runs."""


def make_runs_report(
    runs: Iterable[Root | str],
    output: str | None,
    *,
    by: str | None = None,
    overwrite: bool = False,
    measure: MeasureConfig | None = None,
) -> Report:
    """Render a report of several runs and write it.

    runs: roots, URLs of runs, folders of runs, or patterns such as runs/lr*. output: a path of this machine; None
    writes nothing. by: setting whose equal values make a group, which is drawn as mean and band; None groups runs that
    differ in the seed alone. measure: of the evaluations that are compared.
    """
    return write_page(output, overwrite, lambda: _read_and_render(open_runs(runs), by, measure or MeasureConfig()))


def _read_and_render(roots: Sequence[Root], by: str | None, measure: MeasureConfig) -> str:
    with Connections() as connections:
        runs, comparison = compare_whole_runs(roots, connections, measure, by=by)
        return render_runs(runs, comparison, connections)


def render_runs(runs: Runs, comparison: Comparison, connections: Connections) -> str:
    """Return the page of runs that were read. comparison: theirs, with its table of runs."""
    return render(_gather(runs, comparison, connections), "runs.html.j2")


def _gather(runs: Runs, comparison: Comparison, connections: Connections) -> dict[str, Any]:
    """Return the values that the template shows."""
    groups = lines_of(runs.summaries, runs.by)
    lines = list(dict.fromkeys(groups.get(label, label) for label in runs.roots))
    read = {label: (connections.to(root), root) for label, root in runs.roots.items()}
    with ThreadPoolExecutor() as pool:  # each connection is used by one thread
        found = dict(zip(read, pool.map(lambda of_run: _read_run(*of_run), read.values()), strict=True))
    warnings = [(label, text) for label, (texts, _) in found.items() for text in texts]
    data = {label: figures for label, (_, figures) in found.items()}
    settings = [row["name"] for row in runs.differing if row["kind"] == "setting"]
    names = {label: style(lines.index(groups.get(label, label))) for label in runs.roots}
    return {
        **about_page(),
        "place": split_place(runs.summaries[0].url)[0] if _are_neighbours(runs.summaries) else "",
        "facts": list(_facts(runs, comparison, settings)),
        "runs": [_row(each, names[each.label], groups, settings, warnings) for each in runs.summaries],
        "is_grouped": bool(groups),
        "settings": settings[:_MOST_SETTINGS],
        "num_more_settings": max(0, len(settings) - _MOST_SETTINGS),
        "figures": [draw(each, lines) for each in _overlaid(data, groups)],
        "warnings": warnings,
        "parts_of_comparison": list(_parts(comparison)),
    }


def _read_run(con: duckdb.DuckDBPyConnection, root: Root) -> tuple[list[str], list[FigureData]]:
    """Return the warnings and the figures of a run."""
    diagnostics = read_diagnostics(con, root)
    return [str(each) for each in diagnostics], read_figures(con, root)


def _are_neighbours(summaries: Sequence[RunSummary]) -> bool:
    return len({split_place(each.url)[0] for each in summaries}) == 1


def _overlaid(data: Mapping[str, Sequence[FigureData]], groups: Mapping[str, str]) -> Iterator[FigureData]:
    """Yield each figure that any run has, of all runs that have it. What is noted once is not noted again."""
    noted: set[str] = set()
    for joined in overlays(data, groups):
        yield replace(joined, notes=[note for note in joined.notes if note not in noted])
        noted.update(joined.notes if joined.has_values else ())


def _facts(runs: Runs, comparison: Comparison, settings: Sequence[str]) -> Iterator[str]:
    """Yield how many runs are in each state, what differs, and which run has the highest reward."""
    states = [each.state for each in runs.summaries]
    yield ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states))
    left = len(settings) - _MOST_SETTINGS
    more = f" and {left:,} more" if left > 0 else ""
    yield f"they differ in {', '.join(settings[:_MOST_SETTINGS])}{more}" if settings else "no setting differs"
    if comparison.runs is not None:
        yield comparison.runs.highest()


def _row(
    summary: RunSummary,
    line: str,
    groups: Mapping[str, str],
    settings: Sequence[str],
    warnings: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Return a run as a row of the table beside the first plot."""
    return {
        "style": line,
        "label": summary.label,
        "group": groups.get(summary.label),
        "state": summary.state,
        "state_class": STATE_CLASSES.get(summary.state, ""),
        "problem": summary.problem,
        "step": of_total(summary.step, summary.num_steps),
        "reward": number(summary.reward, 4),
        "settings": [setting_text(summary, name) for name in settings[:_MOST_SETTINGS]],
        "num_warnings": sum(label == summary.label for label, _ in warnings),
    }


def _parts(comparison: Comparison) -> Iterator[Frame | str]:
    """Yield the tables and the lines of the comparison."""
    for part in comparison.parts():
        assert isinstance(part, Frame | Sentence | str), "a comparison has tables and lines"
        yield part if isinstance(part, Frame) else str(part)
