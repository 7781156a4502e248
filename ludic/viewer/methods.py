"""Methods of `ludic.Run` that show what is stored, figures, rollouts, groups, and let people label it.

Each imports what it needs when it is called, so that `import ludic` stays light.
"""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from ludic.store.root import Track, untracked

if TYPE_CHECKING:
    from ludic.sql.connect import HasRoot
    from ludic.viewer.found import Found
    from ludic.viewer.report.page import Report
    from ludic.viewer.stats import Stats


def stats(self: "HasRoot", *, track: Track = untracked) -> "Stats":
    """Return the figures of the run as DataFrames: folders, rollouts, environments, versions, evals, attempts.

    Files that can't be read are listed and left out. Raises QueryError.
    """
    from ludic.viewer.stats import collect_stats

    return collect_stats(self.root, track)


def rollout(self: "HasRoot", rollout_id: str) -> "Found":
    """Find a rollout by its id, or by a beginning or an end that no other rollout_id has.

    Its `record` is the rollout, `tokens()` a table of its response. Raises UnknownIdError.
    """
    from ludic.viewer.found import look_up

    return look_up(self.root, rollout_id, "rollout")


def group(self: "HasRoot", group_id: str) -> "Found":
    """Find a group by its id, or a beginning or an end of it; `records` are its rollouts. Raises UnknownIdError."""
    from ludic.viewer.found import look_up

    return look_up(self.root, group_id, "group")


def show(self: "HasRoot", any_id: str) -> "Found":
    """Find a rollout or a group by its id, or by a beginning or an end of it. Raises UnknownIdError."""
    from ludic.viewer.found import look_up

    return look_up(self.root, any_id)


def label(
    self: "HasRoot",
    rollout_id: str,
    value: float | str | None = None,
    *,
    note: str | None = None,
    name: str = "label",
    author: str | None = None,
) -> None:
    """Label a stored rollout: append a mark and a note to labels/, which the view `labels` shows.

    rollout_id: of rollouts or evals; a beginning or an end of it is enough. value: a number, or a mark in words. Of one
    name and author the newest label counts; a call without value and note withdraws it. author: None takes the name of
    this machine's user. Raises UnknownIdError, ConfigError.
    """
    from ludic.store import Root
    from ludic.store.tables import put_label
    from ludic.viewer.found import look_up

    found = look_up(self.root, rollout_id, "rollout").record.rollout_id
    put_label(Root.open(self.root.url, writable=True), found, value, note, name=name, author=author)


def view(
    self: "HasRoot",
    rollout_id: str | None = None,
    *,
    author: str | None = None,
    picture: str | PathLike[str] | None = None,
    web: bool = False,
    host: str = "127.0.0.1",
    host_names: Sequence[str] = (),
    port: int = 8000,
) -> None:
    """Open the viewer of a run in this terminal; it returns when the user quits.

    rollout_id: rollout to begin with, or a beginning or an end of its id; by default the versions. author: of labels
    given in the viewer, by default the user of this machine. picture: write the first screen to this SVG file and
    return. web: serve the viewer to browsers at host and port until Ctrl-C. host_names: more names by which browsers
    call this machine, such as a proxy's. Raises ConfigError if textual is not installed or the port is taken,
    UnknownIdError.
    """
    from ludic.viewer.terminal.options import ViewOptions
    from ludic.viewer.terminal.start import view_run

    options = ViewOptions(
        rollout_id=rollout_id,
        author=author,
        picture=picture,
        web=web,
        host=host,
        host_names=tuple(host_names),
        port=port,
    )
    view_run(self.root, options)


def report(
    self: "HasRoot",
    output: str | PathLike[str] | None = None,
    *,
    versions: str | None = None,
    compare: Sequence[int | str] = (),
    measures: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
    confidence: float = 0.95,
    overwrite: bool = False,
) -> "Report":
    """Show the run, its stored evaluations and a comparison in one HTML file that needs no network (docs/reports.md).

    output: path of the file, which must not exist unless `overwrite`; None writes nothing, and the result's `html` is
    the page. versions: evaluated versions such as "0,10,latest"; None is all. compare: sides, as of the method
    `compare`; none compare the last evaluated version with the first. measures, params, confidence: see `evaluation`.
    Raises ConfigError if versions or sides have no samples or the file can't be written, QueryError.
    """
    from ludic.eval.config import MeasureConfig
    from ludic.viewer.report.page import make_report

    measure = MeasureConfig(measures=tuple(measures), params=params or {}, confidence=confidence)
    return make_report(
        self.root,
        None if output is None else fspath(output),
        versions=versions,
        sides=[str(side) for side in compare],
        measure=measure,
        overwrite=overwrite,
    )
