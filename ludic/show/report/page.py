"""Gather what a report shows, render it as one HTML file, and write the file.

Stored text is hostile: the template escapes every value, control characters are spelt out, and the page's policy
forbids scripts and requests. Raises ConfigError for versions or sides without samples, and for an output that exists or
can't be written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any

import jinja2

from ludic.errors import ConfigError
from ludic.eval.config import MeasureConfig
from ludic.installed import LUDIC, installed_version
from ludic.paths import local_path
from ludic.results import Part, Result, number, printable, size
from ludic.row_files import open_sink
from ludic.show.evaluations import interval_text
from ludic.show.report import evaluations, training
from ludic.show.stats import describe_run
from ludic.sql.connect import Connections
from ludic.sql.reports import read_reports
from ludic.store import Root


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Result):
    """A report as HTML. A notebook shows it in a frame of its own."""

    html: str
    location: str | None
    """The written file; None if none was asked for."""

    def to_dict(self) -> dict[str, Any]:
        """Return the place and size of the page."""
        return {"location": self.location, "size_bytes": len(self.html.encode())}

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        yield f"{self.location or 'a page'}: {size(len(self.html.encode()))}, one file without scripts or requests"

    def _repr_html_(self) -> str:
        frame = 'sandbox style="width: 100%; height: 48em; border: 1px solid gray"'
        return f'<iframe srcdoc="{escape(self.html)}" {frame}></iframe>'


def make_report(
    root: Root,
    output: str | None,
    *,
    versions: str | None,
    sides: Sequence[str],
    measure: MeasureConfig,
    overwrite: bool,
) -> Report:
    """Render a report and write it. output: a path of this machine; None writes nothing. See `Run.report`."""
    path = None if output is None else local_path(output, "output")
    if path is not None and path.is_dir():
        raise ConfigError(f"{path} is a folder, wanted a file such as {path / 'report.html'}")
    if path is not None and path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; choose another output, or replace it with --overwrite")
    html = render(gather(root, versions, sides, measure))
    if path is not None:
        with open_sink(path) as file:
            file.write(html.encode())
    return Report(html=html, location=None if path is None else str(path))


def gather(root: Root, versions: str | None, sides: Sequence[str], measure: MeasureConfig) -> dict[str, Any]:
    """Return the values that the template shows."""
    with Connections() as connections:
        con = connections.to(root)
        found = evaluations.evaluation_section(connections, root, versions, measure)
        return {
            "root": root.url,
            "made_at": datetime.now(UTC),
            "ludic_version": installed_version(LUDIC),
            "facts": describe_run({"root": root.url, "run_id": root.run_id, "run": asdict(root.run)}),
            "troubles": training.read_troubles(con, root),
            "reports": {name: table.to_pylist() for name, table in read_reports(con, root).items()},
            "figures": training.step_figures(con, root),
            "errors": training.read_errors(con, root),
            "groups": training.read_groups(con, root),
            "evaluation": found,
            "comparison": _compare(connections, root, found["versions"] if found else [], sides, measure),
        }


def _compare(
    connections: Connections, root: Root, versions: Sequence[int], sides: Sequence[str], measure: MeasureConfig
) -> dict[str, Any] | None:
    """Return the comparison of the sides; without sides, that of the last of the evaluated versions with the first."""
    if sides:
        return evaluations.comparison_section(connections, root, sides, measure)
    if len(versions) < 2:
        return None
    try:
        return evaluations.comparison_section(connections, root, [f"{versions[0]}", f"{versions[-1]}"], measure)
    except ConfigError as error:  # they have no example in common
        return {"rows": [], "warnings": [str(error)], "confidence": measure.confidence}


def render(values: dict[str, Any]) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    environment.filters |= {"number": number, "interval": interval_text}
    text = resources.files("ludic.show.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(text).render(values).lstrip()


def _shown(value: Any) -> Any:
    """Spell out control characters of a text before it is escaped; show None as a dash."""
    if value is None:
        return "-"
    return printable(value) if type(value) is str else value  # Markup is a subclass, and is already escaped
