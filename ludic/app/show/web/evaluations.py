"""Pages of evaluations: measures by version with intervals, and two versions compared in pairs on the same examples."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ludic.app.show.evaluations import Evaluation, measure_title
from ludic.app.show.figures import evaluation_figures
from ludic.app.show.report.page import comparison_section
from ludic.app.show.web.conversation import PagedRows, paged
from ludic.app.show.web.pages import PageAnswer, PageRequest, PageTable, page
from ludic.base import Frame
from ludic.errors import ConfigError
from ludic.eval import Chosen, MeasureConfig, numbers, stored_versions
from ludic.root.sql import Connections

_CHANGES = ("gained", "lost", "equal")


@page("evaluations", "evaluations", menu=50)
def evaluations(request: PageRequest) -> PageAnswer:
    """Measures of the stored evaluations by version, as curves and as tables."""
    config = MeasureConfig()
    with _connections(request) as connections:
        root = request.data.root
        con = connections.to(root)
        versions = stored_versions(con, root, request.query.get("versions"))
        found = numbers(root, config, Chosen(versions=versions), con=con) if versions else None
    if found is None:
        nothing: dict[str, Any] = {"tables": [], "figures": [], "versions": [], "pair": None}
        return PageAnswer("evaluations.html.j2", nothing, title="Evaluations")
    shown = Evaluation(url=root.url, numbers=found, confidence=config.confidence)
    tables = [table_of(part) for part in shown.parts() if isinstance(part, Frame)]
    values: dict[str, Any] = {
        "figures": [data.to_json() for data in evaluation_figures(found.rows, config.confidence)],
        "tables": [paged(request, table, f"{table.name}_row") for table in reversed(tables)],
        "versions": versions,
        "pair": (versions[0], versions[-1]) if len(versions) > 1 else None,
    }
    return PageAnswer("evaluations.html.j2", values, title="Evaluations", tables=tables)


@page("paired", "Comparison")
def paired_comparison(request: PageRequest) -> PageAnswer:
    """Two evaluated versions on the same examples: differences with intervals, and the examples that changed."""
    a, b = (_version(request, name) for name in ("a", "b"))
    with _connections(request) as connections:
        versions = stored_versions(connections.to(request.data.root), request.data.root, None)
        found = comparison_section(connections, request.data.root, [a, b], MeasureConfig())
    differences = table_of(found["table"])
    examples = _examples(request, found["examples"])
    values = {
        "a": a,
        "b": b,
        "versions": versions,
        "warnings": found["warnings"],
        "rows": found["rows"],
        "differences": differences,
        "examples": examples,
        "changes": [(name, request.here(change=name, example=None)) for name in _CHANGES],
        "change": request.query.get("change"),
        "all_href": request.here(change=None, example=None),
        "swap_href": request.here(a=b, b=a),
        "env_links": _example_links(request, found["rows"]),
    }
    title = f"Version {b} compared with version {a}"
    return PageAnswer("paired.html.j2", values, title=title, tables=[differences, examples.table])


@contextmanager
def _connections(request: PageRequest) -> Iterator[Connections]:
    """Yield connections of which that of this run is the page's own, so that its queries end with the page."""
    with request.data.reading() as con, Connections({request.data.root.url: con}) as connections:
        yield connections


def _version(request: PageRequest, name: str) -> str:
    """Return a version that the address names; not the root of another run, which the address must not choose."""
    text = request.required(name)
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ConfigError(f"{name} is {text!r}, wanted an evaluated version of this run, such as 0")
    return text


def table_of(frame: Frame) -> PageTable:
    """Return a frame of a result as a table of a page, which always has a heading."""
    return replace(PageTable.of(frame), heading=frame.heading or frame.name.capitalize())


def _examples(request: PageRequest, examples: Any) -> PagedRows:
    """Return the examples of both sides with their values, those that changed most first."""
    change = request.query.get("change")
    if change and change not in _CHANGES:
        raise ConfigError(f"change is {change!r}, wanted one of {', '.join(_CHANGES)}")
    rows = [
        {
            "change": _change(row["difference"]),
            "env_name": row["env_name"],
            "env_example_id": row["env_example_id"],
            "measure": measure_title(row),
            "value_a": row["value_a"],
            "value_b": row["value_b"],
            "difference": row["difference"],
        }
        for row in examples
    ]
    rows = [row for row in rows if not change or row["change"] == change]
    rows.sort(key=lambda row: (-abs(row["difference"]), row["env_name"], row["env_example_id"]))
    table = PageTable(
        name="examples",
        rows=rows,
        columns=("change", "env_name", "env_example_id", "measure", "value_a", "value_b", "difference"),
        titles={"value_a": f"version {request.query['a']}", "value_b": f"version {request.query['b']}"},
        links={"env_example_id": lambda row: request.link("example", env=row["env_name"], id=row["env_example_id"])},
    )
    return paged(request, table, "example", 50)


def _change(difference: float) -> str:
    return "gained" if difference > 0 else "lost" if difference < 0 else "equal"


def _example_links(request: PageRequest, rows: Any) -> Mapping[str, str]:
    """Return the address of each shown example, and of the comparison of both of its answers."""
    links = {}
    for row in rows:
        for example in (each for some in row["changed"].values() for each in some):
            ids = [side.get("rollout_id") for side in example["sides"]]
            if all(ids):
                links[example["env_example_id"]] = request.link("compare", a=ids[0], b=ids[1])
    return links
