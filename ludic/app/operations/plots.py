"""Plot the figures of runs with matplotlib, and return their numbers as Polars frames."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ludic.app.operations.operation import operation
from ludic.errors import ConfigError
from ludic.settings import FromFlag, Shown

if TYPE_CHECKING:
    import polars as pl

    from ludic.app.operations.drawing import Plot
    from ludic.app.operations.run import Run
    from ludic.app.show.figures import FigureData, Mark
    from ludic.root import Root
    from ludic.root.sql import Connections, RootLike

STEPS = "steps"
_DEFAULT = ("reward_mean", "response_length_mean")


@operation()
def plot(
    run: "Run",
    *names: str,
    by: str | None = None,
    also: Annotated["Iterable[RootLike]", FromFlag(Annotated[tuple[str, ...], Shown("ROOT")])] = (),
) -> "Plot":
    """Plot figures of a run by their names, as a matplotlib figure with one axes each.

    names: of docs/reading.md, such as reward_mean or entropy; NAME/PART for one part, such as evaluation/mean_reward.
    None given: reward and length. by: a line for each value of a column of rollouts or of the data set, such as
    env_name; a figure of which only the whole run is known says so. also: runs to lay over this one. Warnings of the
    run are marked at their steps. Raises ConfigError for an unknown name, QueryError for an unknown column, and
    MissingPackageError without matplotlib (`pip install 'ludic-rl[plot]'`).
    """
    from ludic.app.show.comparison import open_runs

    return _plot({root.url: [root] for root in open_runs([run.root, also])}, names, by)


@operation()
def plot_runs(
    runs: "RootLike | Iterable[RootLike] | Mapping[str, RootLike | Iterable[RootLike]]",
    *names: str,
    by: str | None = None,
) -> "Plot":
    """Plot figures of several runs over each other, as `Run.plot` does; one colour a run.

    runs: one, several, or a mapping from labels to them; also folders of runs, and patterns such as runs/lr*. A run
    that is named twice counts once. The runs of one label, such as seeds, are drawn as their mean and a band from the
    lowest to the highest. Raises as `Run.plot`, and QueryError for a run with two labels.
    """
    from ludic.app.show.comparison import open_runs
    from ludic.root.sql import open_roots

    if not isinstance(runs, Mapping):
        return _plot({root.url: [root] for root in open_runs([runs])}, names, by)
    labels = [*map(str, runs)]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ConfigError(f"two runs have the label {twice[0]!r}; name each label once")
    opened = {label: open_runs([each]) for label, each in zip(labels, runs.values(), strict=True)}
    open_roots([root for roots in opened.values() for root in roots])  # which refuses one that is given twice
    return _plot(opened, names, by, are_labels=True)


@operation()
def frame(run: "Run", name: str = STEPS, *, by: str | None = None) -> "pl.DataFrame":
    """Return the numbers below the plots as a Polars DataFrame.

    name: steps has a row per gradient step with all numbers that plots show of it, and with `by` a row per step and
    value of this column of rollouts or of the data set, such as env_name. The name of a figure has a row per point of
    it: step or version, line, value, low and high. Steps that a later attempt replaced are left out. (The view `steps`
    of `Run.sql` is another table: turns of agents.) Raises ConfigError, QueryError.
    """
    from ludic.app.show.figures import check_figure, read_figure, step_frame
    from ludic.root.sql import Connections

    _checked([], by)
    with Connections() as connections:
        con = connections.to(run.root)
        if name == STEPS:
            return step_frame(con, run.root, by)
        check_figure(name, others=[STEPS])
        return read_figure(con, run.root, name, by=by).frame()


def _plot(
    runs: "Mapping[str, Sequence[Root]]", names: Sequence[str], by: str | None, *, are_labels: bool = False
) -> "Plot":
    """Return the plot of runs by label; without labels, by their URLs, which become short ones."""
    from ludic.app.operations.drawing import draw
    from ludic.app.show.figures import check_figure, short_labels
    from ludic.root.sql import Connections

    names = _checked(names, by) or _DEFAULT
    for name in names:
        check_figure(name)
    if not are_labels:
        runs = dict(zip(short_labels([*runs]), runs.values(), strict=True))
    with Connections() as connections:
        marks = {root.url: _marks_of(connections, root) for roots in runs.values() for root in roots}
        return draw([data for name in names for data in _overlaid(connections, runs, name, by, marks)])


def _checked(names: Sequence[Any], by: Any) -> tuple[str, ...]:
    """Return the names of figures, also those of a list. Raises ConfigError for what is no name."""
    flat = [each for name in names for each in (name if isinstance(name, list | tuple) else [name])]
    if wrong := [name for name in flat if not isinstance(name, str)]:
        raise ConfigError(f"names of figures are texts, such as 'reward_mean'; got {wrong[0]!r}")
    if not (by is None or isinstance(by, str)):
        raise ConfigError(f"by is {by!r}, wanted the name of one column, such as 'env_name'; plot once for each column")
    return tuple(flat)


def _marks_of(connections: "Connections", root: "Root") -> "list[Mark]":
    from ludic.app.show.figures import diagnostic_marks, read_diagnostics

    return diagnostic_marks(read_diagnostics(connections.to(root), root))


def _overlaid(
    connections: "Connections",
    runs: "Mapping[str, Sequence[Root]]",
    name: str,
    by: str | None,
    marks: "Mapping[str, Sequence[Mark]]",
) -> "Iterable[FigureData]":
    """Yield each part of a figure, of all runs."""
    from ludic.app.show.figures import overlay, read_parts

    parts: dict[str, dict[str, Any]] = {}
    groups: dict[str, str] = {}
    for label, roots in runs.items():
        for root, own in zip(roots, [label] if len(roots) == 1 else _members(label, roots, runs), strict=True):
            groups |= {own: label} if len(roots) > 1 else {}
            for data in read_parts(connections.to(root), root, name, by=by, marks=marks[root.url]):
                parts.setdefault(data.name, {})[own] = data
    if len(parts) > 1:  # of a run without any part, the figure itself, which is empty
        parts.pop(name, None)
    for of_runs in parts.values():
        yield next(iter(of_runs.values())) if len(marks) == 1 else overlay(of_runs, groups)


def _members(label: str, roots: "Sequence[Root]", labels: Iterable[str]) -> Iterator[str]:
    """Yield a label of its own for each run of a group, such as a seed."""
    for number, _ in enumerate(roots, 1):
        name = f"{label} {number}"
        while name in labels:
            name += "'"
        yield name
