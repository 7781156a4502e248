"""The first page of a run: its state, warnings and live curves; and one curve with its numbers.

The page itself reads almost nothing: its script asks for the state and the curves, which are computed again when the
run has stored new metrics.
"""

import time
from typing import Any

from ludic.app.show.data import RunData
from ludic.app.show.figures import ENVIRONMENT, FigureData, figure_names, read_figure, read_figures
from ludic.app.show.status import as_texts
from ludic.app.show.web.pages import JsonAnswer, PageAnswer, PageRequest, PageTable, page
from ludic.app.show.web.site import Site
from ludic.root.rows import metrics_file_names


@page("overview", "overview", menu=10)
def overview(request: PageRequest) -> PageAnswer:
    """What there is, and places for what the script reads."""
    (counts,) = request.data.ask_rows(_COUNTS, {})
    keys, columns = request.kept("columns", int(time.monotonic() // _COLUMNS_S), request.data.columns_to_group)
    values = {
        "counts": counts,
        "by": request.query.get("by", ""),
        "names": dict.fromkeys([*keys, ENVIRONMENT, *columns]),
        "notices": request.site.notices(),
    }
    return PageAnswer("overview.html.j2", values)


_COLUMNS_S = 30.0
"""Seconds after which the columns of the data set are looked up again."""
_COUNTS = """
select
    (select count(*) from rollouts) as rollouts,
    (select count(*) from evals) as evals,
    (select max(version) from rollouts) as version
"""


@page("state", "state")
def state(request: PageRequest) -> JsonAnswer:
    """The state of the run, as `ludic watch` shows it."""
    status = request.data.status()
    lines, tables = as_texts(status)
    facts, more = ([line for line in lines if (line[0] in _FIRST) is is_first] for is_first in (True, False))
    return JsonAnswer({"facts": facts, "more": more, "tables": tables, "unreadable": list(status.unreadable)})


_FIRST = ("agents", "trainer", "step", "balance", "dropped")
"""Lines of the state that are not folded."""


@page("figures", "figures")
def figures(request: PageRequest) -> JsonAnswer:
    """All curves of steps, and the warnings."""
    by = request.query.get("by") or None
    found, warnings = _of_steps(request.site, request.label, request.data, by)
    return JsonAnswer({"figures": _linked(request, found, by), "warnings": warnings})


def _of_steps(site: Site, label: str, data: RunData, by: str | None) -> tuple[list[FigureData], list[str]]:
    """Return the curves of steps and the warnings, which are read again when the run has stored new metrics."""

    def read() -> tuple[list[FigureData], list[str]]:
        diagnostics = data.diagnostics()
        with data.reading() as con:
            return read_figures(con, data.root, diagnostics, by=by), list(map(str, diagnostics))

    return site.kept((label, f"figures by {by}"), metrics_file_names(data.root), read)


def curves_of(site: Site, label: str, data: RunData) -> list[FigureData]:
    """Return the curves of a run."""
    return _of_steps(site, label, data, None)[0]


def _linked(request: PageRequest, found: list[FigureData], by: str | None = None) -> list[dict[str, Any]]:
    return [{**data.to_json(), "href": request.link("figure", name=data.name, by=by)} for data in found]


@page("figure", "figure")
def one_figure(request: PageRequest) -> PageAnswer:
    """One curve, and the table of its numbers."""
    name, by = request.required("name"), request.query.get("by") or None
    with request.data.reading() as con:
        data = read_figure(con, request.data.root, name, by=by)
    values = data.to_json()
    names = different([data.x_name, *(each.name for each in data.series)])
    columns = [values["x"], *(each["values"] for each in values["series"])]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    table = PageTable(name="numbers", rows=rows, columns=names)
    shown = {"figure": values, "table": table, "names": figure_names()}
    return PageAnswer("figure.html.j2", shown, title=data.title, tables=[table])


def different(names: list[str]) -> list[str]:
    """Return names for columns: a line that is called as an earlier one, or as the axis, gets an underscore."""
    found: list[str] = []
    for name in names:
        while name in found:
            name += "_"
        found.append(name)
    return found
