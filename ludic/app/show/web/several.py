"""Several runs: the table of the runs below a folder, and the curves of chosen ones over each other."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ludic.app.show.evaluations import compare_whole_runs
from ludic.app.show.figures import overlays
from ludic.app.show.runs import lines_of
from ludic.app.show.web.overview import curves_of
from ludic.app.show.web.pages import JsonAnswer, PageAnswer, PageRequest, PageTable, page
from ludic.base import Frame
from ludic.errors import ConfigError
from ludic.eval import MeasureConfig
from ludic.root.sql import Connections

_MOST_RUNS = 24
"""Runs whose curves are drawn over each other."""
_SEEDS = "seed"
"""Value of the parameter `by` that groups the runs that differ in nothing but the seed."""


@page("runs", "runs", of_run=False)
def show_runs(request: PageRequest) -> PageAnswer:
    """The runs below the folder; chosen ones are drawn over each other."""
    found = request.site.table()
    frames = [part for part in found.parts() if isinstance(part, Frame)]
    labels = {each.url: each.label for each in found.runs}
    links = {"run": lambda row: request.site.link(labels[row["url"]], "overview", {})}
    tables = [PageTable.of(frame, links) for frame in frames]
    values = {
        "found": found,
        "table": tables[0] if tables else None,
        "labels": [labels[row["url"]] for row in frames[0].rows] if frames else [],
        "problems": {each.label: each.problem for each in found.runs if each.problem},
        "settings": found.differing,
    }
    return PageAnswer("runs.html.j2", values, title=f"runs below {found.folder}", tables=tables)


@page("curves", "curves", of_run=False)
def curves(request: PageRequest) -> PageAnswer:
    """A place for the curves of chosen runs, which the script reads."""
    labels, by = _chosen(request), request.query.get("by", "")
    settings = request.site.table().differing
    source = request.link("overlaid", run=labels, by=by)
    return PageAnswer(
        "curves.html.j2", {"labels": labels, "by": by, "settings": settings, "source": source, "seeds": _SEEDS}
    )


@page("overlaid", "overlaid", of_run=False)
def overlaid(request: PageRequest) -> JsonAnswer:
    """The curves of the chosen runs. by: a setting whose equal values make a group, or seed."""
    labels, by = _chosen(request), request.query.get("by", "")
    runs = [each for each in request.site.table().runs if each.label in labels]
    groups = lines_of(runs, None if by == _SEEDS else by) if by else {}
    found = {label: curves_of(request.site, label, request.open(label)) for label in labels}
    lines = list(dict.fromkeys(groups.get(label, label) for label in labels))
    return JsonAnswer({"figures": [data.to_json(lines) for data in overlays(found, groups)]})


@page("compare-runs", "comparison of runs", of_run=False)
def compare_runs(request: PageRequest) -> PageAnswer:
    """The tables of `ludic compare` for the chosen runs; the first one is the baseline. by: a setting that groups."""
    labels, by = _chosen(request), request.query.get("by", "")
    if by == _SEEDS:
        raise ConfigError("runs are compared one by one, or as groups by another setting than the seed")
    with ExitStack() as stack:
        data = [request.open(label) for label in labels]
        lent = {each.root.url: stack.enter_context(each.reading()) for each in data}
        connections = stack.enter_context(Connections(lent))
        _, found = compare_whole_runs([each.root for each in data], connections, MeasureConfig(), by=by or None)
    assert found.runs is not None
    names = dict(zip(lent, labels, strict=True))

    def to_run(row: Mapping[str, Any]) -> str:
        return request.site.link(names[row["url"]], "overview", {})

    parts = [
        PageTable.of(part, {"run": to_run} if part.name == "runs" else {}) if isinstance(part, Frame) else str(part)
        for part in found.parts()
    ]
    values = {
        "labels": labels,
        "by": by,
        "settings": [name for name in request.site.table().differing if name != _SEEDS],
        "highest": found.runs.highest(),
        "parts": parts,
        "others": {label: request.here(run=[label, *(each for each in labels if each != label)]) for label in labels},
    }
    return PageAnswer("compare_runs.html.j2", values, tables=[part for part in parts if isinstance(part, PageTable)])


def _chosen(request: PageRequest) -> list[str]:
    labels = list(dict.fromkeys(request.values("run")))
    if not labels:
        raise ConfigError("no run is chosen; choose some in the list of runs")
    if len(labels) > _MOST_RUNS:
        raise ConfigError(f"{len(labels)} runs are chosen, wanted at most {_MOST_RUNS}")
    return labels
