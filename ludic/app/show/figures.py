"""The catalogue of figures: what each is called, which SQL gives its numbers, its lines, axes and marks.

Page, report and matplotlib draw the same `FigureData`. Reads views of one root through a connection to it. Raises
ConfigError for an unknown figure or column, with the names that exist; QueryError if a file can't be read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

import duckdb

from ludic.app.show.evaluations import measure_title
from ludic.base import number
from ludic.errors import ConfigError, unknown_name
from ludic.eval import Chosen, MeasureConfig, numbers, stored_versions
from ludic.records import Row
from ludic.root import Root
from ludic.root.rows import POPULATIONS
from ludic.root.sql import ask, components_by_environment, figure, means, steps_by_environment
from ludic.run import Diagnostic

Values = Mapping[float, float | None]
"""Values by x."""
ErrorBar = tuple[float | None, float | None]

COLOURS: Sequence[str] = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#3A9BD9", "#7A6F00", "#555555")
"""Colours of lines on light paper, in their order: hues of Okabe and Ito, which colour-blind readers tell apart."""
DARK_COLOURS: Sequence[str] = ("#56A8E0", "#F08A4B", "#2FC79A", "#DE8FC0", "#E6B422", "#8FD0FF", "#F0E442", "#BBBBBB")
"""The same colours for dark paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a figure."""

    name: str
    values: Values
    intervals: Mapping[float, ErrorBar] | None = None
    """Lower and upper bound by x; None for values without intervals."""
    run: str = ""
    """Label of the run, or of the group of runs; empty in a figure of one run."""
    band: bool = False
    """Whether the intervals are drawn as a band, not as bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line at an x, with a short label."""

    x: float
    label: str
    text: str
    """Text that a pointer over it shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureData:
    """The numbers of one figure, complete: nothing is binned or left out."""

    name: str
    """Stable name: that of the catalogue, or NAME/PART for one part of such a figure."""
    title: str
    unit: str
    x_name: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    notes: Sequence[str] = ()
    log_y: bool = False

    @property
    def has_values(self) -> bool:
        """Whether any value is known and finite."""
        return any(_finite(value) is not None for each in self.series for value in each.values.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain values: lists as long as `x`, with None where a value is unknown or not finite.

        low and high are empty lists for a series without intervals.
        """
        xs = sorted({x for each in self.series for x in each.values})
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "x_name": self.x_name,
            "x": xs,
            "series": [
                {
                    "name": each.name,
                    "run": each.run,
                    "band": each.band,
                    "values": [_finite(each.values.get(x)) for x in xs],
                    "low": _bounds(each, xs, 0),
                    "high": _bounds(each, xs, 1),
                }
                for each in self.series
            ],
            "marks": [{"x": mark.x, "label": mark.label, "text": mark.text} for mark in self.marks],
            "notes": [*self.notes],
            "log_y": self.log_y,
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _bounds(series: Series, xs: Sequence[float], side: Literal[0, 1]) -> list[float | None]:
    if series.intervals is None:
        return []
    return [_finite(series.intervals.get(x, (None, None))[side]) for x in xs]


# --- The catalogue ---------------------------------------------------------------------------------------------------

Source = Literal["steps", "considered", "components", "versions", "outcomes", "evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureKind:
    """A figure that can be asked for by its name."""

    name: str
    title: str
    unit: str
    note: str = ""
    x_name: str = "step"
    source: Source = "steps"
    """Rows of which it is made; see `_Rows`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of the rows, by the names of their lines."""
    split: str = ""
    """Column of the rows by environment, or by another column; empty if only the whole run has values."""
    split_unit: str = ""
    """Unit of the split figure, if it differs."""
    log_y: bool = False


_OF_STEP = f"mean of a step's {POPULATIONS['reward_mean']}"
_SHARE = f"share of a step's {POPULATIONS['reward_mean']}"

FIGURES: Sequence[FigureKind] = (
    FigureKind(
        name="reward_mean", title="Reward", unit=_OF_STEP, columns={"reward": "reward_mean"}, split="reward_mean"
    ),
    FigureKind(
        name="response_length_mean",
        title="Response length",
        unit=f"tokens, mean of a step's {POPULATIONS['response_length_mean']}",
        columns={"length": "response_length_mean"},
        split="response_length_mean",
        split_unit=f"tokens, {_OF_STEP}",
    ),
    FigureKind(
        name="signal",
        title="Groups with a signal",
        unit="share of a step's groups whose rewards differ",
        source="considered",
        split="signal",
    ),
    FigureKind(
        name="truncated_fraction", title="Truncated", unit=_SHARE, source="considered", split="truncated_fraction"
    ),
    FigureKind(name="error_fraction", title="Failed", unit=_SHARE, source="considered", split="error_fraction"),
    FigureKind(name="reward_components", title="Components of the reward", unit=_OF_STEP, source="components"),
    FigureKind(
        name="accuracy",
        title="Correct answers",
        unit="share of a version's rollouts",
        x_name="version",
        source="versions",
        split="accuracy",
    ),
    FigureKind(name="loss", title="Loss", unit="of a step", columns={"loss": "loss"}),
    FigureKind(name="entropy", title="Entropy", unit="nats per token", columns={"entropy": "entropy"}),
    FigureKind(
        name="reference_kl",
        title="KL to the reference model",
        unit="nats per token",
        columns={"KL": "reference_kl"},
    ),
    FigureKind(
        name="sampler_kl",
        title="Mismatch of sampler and trainer",
        unit="nats per token",
        note="KL of the sampler's logprobs to the trainer's, by the estimators k3 and k1. "
        "It grows with off-policy steps.",
        columns={"k3": "sampler_kl", "k1": "sampler_kl_k1"},
    ),
    FigureKind(
        name="ratio",
        title="Importance ratio",
        unit="trainer's over sampler's probability",
        columns={"1st percentile": "ratio_p01", "mean": "ratio_mean", "99th percentile": "ratio_p99"},
    ),
    FigureKind(
        name="clip_fraction",
        title="Clipped tokens",
        unit="share of a step's tokens",
        columns={"clipped": "clip_fraction"},
    ),
    FigureKind(
        name="off_policy_steps",
        title="Lag",
        unit="off-policy steps",
        note="Versions between the weights that sampled and those that train.",
        columns={"mean": "off_policy_steps_mean", "highest": "off_policy_steps_max"},
    ),
    FigureKind(
        name="tokens_per_s",
        title="Throughput",
        unit="tokens per second",
        columns={"trained": "tokens_per_s", "sampled": "sampled_tokens_per_s"},
    ),
    FigureKind(
        name="step_s",
        title="Time of a step",
        unit="seconds",
        columns={"step": "step_s", "waiting for rollouts": "wait_s"},
    ),
    FigureKind(name="grad_norm", title="Gradient norm", unit="before clipping", columns={"norm": "grad_norm"}),
    FigureKind(
        name="expert_imbalance",
        title="Balance of experts",
        unit="tokens of the most chosen expert over the mean of its layer",
        note="Of the most uneven layer; 1 if all experts are chosen alike.",
        columns={"imbalance": "expert_imbalance"},
    ),
    FigureKind(name="outcomes", title="Rollouts used and dropped", unit="rollouts per step", source="outcomes"),
    FigureKind(
        name="evaluation",
        title="Evaluations",
        unit="mean over examples, {confidence:g}% intervals",
        x_name="version",
        source="evaluation",
    ),
)
"""All figures, in the order of the report.

A name may be followed by a part: reward_mean/env_name has a line for each environment, reward_components/ENV is of one
environment, evaluation/MEASURE of one measure.
"""

ENVIRONMENT = "env_name"


def figure_names() -> list[str]:
    """Return the names of all figures, in the order of the report."""
    return [kind.name for kind in FIGURES]


# --- The numbers of one run ------------------------------------------------------------------------------------------


def read_figure(
    con: duckdb.DuckDBPyConnection, root: Root, name: str, *, by: str | None = None, marks: Sequence[Mark] = ()
) -> FigureData:
    """Return a figure of a run by its name, or NAME/PART. Raises ConfigError for an unknown one.

    by: a line for each value of this column, where the figure's numbers are known by rollouts; others say in a note
    that they are of the whole run. marks: drawn over steps only. A figure without numbers has no series.
    """
    base, _, part = name.partition("/")
    kind = next((each for each in FIGURES if each.name == base), None)
    if kind is None:
        raise ConfigError(unknown_name("figure", name, figure_names()))
    if kind.split and part:
        by, part = part, ""
    rows = _Rows(con=con, root=root)
    found = list(_of_kind(kind, rows, by, bool(by)))
    if part:
        chosen = [each for each in found if each.name == name]
        if not chosen:
            raise ConfigError(unknown_name("figure", name, [each.name for each in found]))
        found = chosen
    data = _joined(kind, found) if len(found) != 1 else found[0]
    return replace(data, marks=[*marks] if kind.x_name == "step" else [])


def read_figures(
    con: duckdb.DuckDBPyConnection, root: Root, diagnostics: Sequence[Diagnostic] = (), *, by: str | None = None
) -> list[FigureData]:
    """Return all figures of gradient steps, in the order of the report; [] before the first step.

    diagnostics: in the order of their numbers; figures mark the steps at which they begin. by: column by which figures
    have lines instead of by environment. Evaluations are not among them: see `evaluation_figures`.
    """
    rows = _Rows(con=con, root=root)
    if not rows.steps():
        return []
    marks, shown = diagnostic_marks(diagnostics), []
    has_several = by is not None or len({row[ENVIRONMENT] for row in rows.considered(ENVIRONMENT)}) > 1
    later: list[FigureData] = []
    for kind in FIGURES:
        if kind.source == "evaluation":
            continue
        for data in _of_kind(kind, rows, by if kind.source != "steps" else None, False):
            own = marks
            if kind.source == "components":
                own = diagnostic_marks(diagnostics, data.name.partition("/")[2])
            is_marked = kind.x_name == "step" and kind.source != "outcomes"
            shown.append(replace(data, marks=own if is_marked else []))
        if kind.source == "steps" and kind.split and has_several:
            later += [replace(data, marks=marks) for data in _of_kind(kind, rows, by or ENVIRONMENT, True)]
        if kind.name == "response_length_mean":
            shown += later
    return shown


def diagnostic_marks(diagnostics: Sequence[Diagnostic], env_name: str | None = None) -> list[Mark]:
    """Return a mark for each step at which diagnostics begin, with their numbers in the list of warnings.

    env_name: leaves out the diagnostics of other environments.
    """
    numbers_at: dict[int, list[int]] = {}
    for index, diagnostic in enumerate(diagnostics, 1):
        is_of_it = env_name is None or diagnostic.env_name in (None, env_name)
        if is_of_it and diagnostic.since is not None and diagnostic.since.step is not None:
            numbers_at.setdefault(diagnostic.since.step, []).append(index)
    return [
        Mark(
            x=step,
            label=", ".join(map(str, of_step)),
            text="\n".join(str(diagnostics[index - 1]) for index in of_step),
        )
        for step, of_step in numbers_at.items()
    ]


def evaluation_figures(rows: Sequence[Row], confidence: float) -> Iterator[FigureData]:
    """Yield a figure over versions for each measure that changes, with a line for each environment and evaluation.

    rows: of ludic.eval.Numbers.
    """
    kind = next(kind for kind in FIGURES if kind.source == "evaluation")
    evaluations = {(row["env_name"], row["evaluation"]) for row in rows}
    has_several = len(evaluations) > len({env for env, _ in evaluations})
    for title in dict.fromkeys(map(measure_title, rows)):
        of_measure = [row for row in rows if measure_title(row) == title]
        if len({row["estimate"] for row in of_measure}) < 2 or len({row["policy_version"] for row in of_measure}) < 2:
            continue
        lines: dict[str, list[Row]] = {}
        for row in of_measure:
            name = f"{row['env_name']} {row['evaluation'] or 'imported'}" if has_several else row["env_name"]
            lines.setdefault(name, []).append(row)
        series = [
            Series(
                name=name,
                values={row["policy_version"]: row["estimate"] for row in of_line},
                intervals={row["policy_version"]: (row["low"], row["high"]) for row in of_line},
            )
            for name, of_line in lines.items()
        ]
        unit = kind.unit.format(confidence=100 * confidence)
        yield FigureData(name=f"{kind.name}/{title}", title=title, unit=unit, x_name=kind.x_name, series=series)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of one run by their source; each is read once."""

    con: duckdb.DuckDBPyConnection
    root: Root
    _read: dict[tuple[str, ...], list[Row]] = field(default_factory=dict)

    def steps(self) -> list[Row]:
        return self._once(("steps",), lambda: ask(self.con, self.root, figure("steps")))

    def considered(self, by: str) -> list[Row]:
        self._check(by)
        return self._once(("considered", by), lambda: steps_by_environment(self.con, self.root))

    def versions(self, by: str) -> list[Row]:
        self._check(by)
        return self._once(("versions", by), lambda: ask(self.con, self.root, means(f"version, {by}", "rollouts")))

    def components(self) -> list[Row]:
        return self._once(("components",), lambda: components_by_environment(self.con, self.root))

    def outcomes(self) -> list[Row]:
        return self._once(("outcomes",), lambda: ask(self.con, self.root, figure("outcomes_by_step")))

    def measures(self) -> list[Row]:
        versions = stored_versions(self.con, self.root, None)
        if not versions:
            return []
        chosen = Chosen(versions=versions)
        return [*numbers(self.root, MeasureConfig(), chosen, con=self.con).rows]

    def _check(self, by: str) -> None:
        if by != ENVIRONMENT:
            raise ConfigError(unknown_name("column", by, [ENVIRONMENT]))

    def _once(self, key: tuple[str, ...], read: Callable[[], list[Row]]) -> list[Row]:
        if key not in self._read:
            self._read[key] = read()
        return self._read[key]


def _of_kind(kind: FigureKind, rows: _Rows, by: str | None, is_split: bool) -> Iterator[FigureData]:
    """Yield the figures of a kind: one, or one for each of its parts.

    is_split: whether a figure of the whole run is split as well; those that are always split are by environment.
    """
    make = partial(FigureData, unit=kind.unit, x_name=kind.x_name, log_y=kind.log_y)
    notes = [kind.note] if kind.note else []
    match kind.source:
        case "steps" if is_split and by is not None and kind.split:
            lines = _lines(rows.considered(by), "step", by, kind.split)
            title = f"{kind.title} by {'environment' if by == ENVIRONMENT else by}"
            unit = kind.split_unit or kind.unit
            yield make(name=f"{kind.name}/{by}", title=title, unit=unit, series=lines, notes=notes)
        case "steps":
            found = rows.steps()
            lines = [
                Series(name=name, values={row["step"]: row[column] for row in found})
                for name, column in kind.columns.items()
            ]
            yield make(name=kind.name, title=kind.title, series=lines if found else [], notes=notes + _whole(by))
        case "considered" | "versions":
            column = by or ENVIRONMENT
            found = rows.considered(column) if kind.source == "considered" else rows.versions(column)
            name = kind.name if by is None else f"{kind.name}/{by}"
            title = kind.title if by in (None, ENVIRONMENT) else f"{kind.title} by {by}"
            lines = _lines(found, kind.x_name, column, kind.split)
            if kind.source == "considered" or any(row[kind.split] is not None for row in found):
                yield make(name=name, title=title, series=lines, notes=notes)
        case "components":
            found = rows.components()
            for env_name in dict.fromkeys(row[ENVIRONMENT] for row in found):
                own = [row for row in found if row[ENVIRONMENT] == env_name]
                title = f"{kind.title} in {env_name}"
                lines = _lines(own, "step", "component", "value_mean")
                yield make(name=f"{kind.name}/{env_name}", title=title, series=lines, notes=notes)
        case "outcomes":
            yield make(name=kind.name, title=kind.title, **_outcomes(rows.outcomes()))
        case "evaluation":
            yield from evaluation_figures(rows.measures(), MeasureConfig().confidence)


def _whole(by: str | None) -> list[str]:
    return [] if by is None else [f"Of the whole run: these numbers are not known by {by}."]


def _lines(rows: Sequence[Row], x: str, by: str, column: str) -> list[Series]:
    """Return a line for each value of a column, in the order of the rows."""
    return [
        Series(name=_value_name(value), values={row[x]: row[column] for row in rows if row[by] == value})
        for value in dict.fromkeys(row[by] for row in rows)
    ]


def _value_name(value: Any) -> str:
    if value is None:
        return "(no value)"
    if isinstance(value, bool):
        return str(value).lower()
    return number(value) if isinstance(value, float) else str(value)


def _outcomes(rows: Sequence[Row]) -> dict[str, Any]:
    steps = sorted({row["step"] for row in rows})
    counts = {(row["step"], row["outcome"]): row["num_rollouts"] for row in rows}
    names = list(dict.fromkeys(row["outcome"] for row in rows))
    lines = [Series(name=name, values={step: counts.get((step, name), 0) for step in steps}) for name in names]
    return {"series": lines, "notes": [] if any(name != "used" for name in names) else ["No rollout was dropped."]}


def _joined(kind: FigureKind, parts: Sequence[FigureData]) -> FigureData:
    """Return the parts of a figure as one; without parts, a figure without lines."""
    series = [
        replace(each, name=f"{part.name.partition('/')[2]}: {each.name}") for part in parts for each in part.series
    ]
    unit = parts[0].unit if parts else kind.unit.format(confidence=100 * MeasureConfig().confidence)
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return FigureData(
        name=kind.name, title=kind.title, unit=unit, x_name=kind.x_name, series=series, notes=[*notes], log_y=kind.log_y
    )


# --- Several runs ----------------------------------------------------------------------------------------------------


def overlay(figures: Mapping[str, FigureData], groups: Mapping[str, str] | None = None) -> FigureData:
    """Return one figure of several runs.

    figures: the same figure of each run, by the run's label. groups: label of a group by label of a run; the runs of a
    group, such as seeds, become one line: their mean, with a band from the lowest to the highest of them. A run without
    a group keeps its own line. Raises ValueError for no figure, or for figures of different names.
    """
    if len({data.name for data in figures.values()}) != 1:
        raise ValueError(f"wanted one figure of several runs, found {sorted({data.name for data in figures.values()})}")
    groups = groups or {}
    first = next(iter(figures.values()))
    is_single = all(len(data.series) <= 1 for data in figures.values())
    members: dict[tuple[str, str], list[Series]] = {}
    for label, data in figures.items():
        for each in data.series:
            members.setdefault((groups.get(label, label), each.name), []).append(each)
    sizes = {group: sum(groups.get(label) == group for label in figures) for group in groups.values()}
    series, notes = [], [note for data in figures.values() for note in data.notes]
    for (label, line), found in members.items():
        name = label if is_single else f"{label}: {line}"
        if sizes.get(label, 1) == 1:
            series.append(replace(found[0], name=name, run=label))
            continue
        mean = _mean_of(found)
        series.append(replace(mean, name=name, run=label))
        counts = [sum(_finite(each.values.get(x)) is not None for each in found) for x in mean.values]
        fewer = "" if min(counts, default=0) == sizes[label] else f", of {min(counts, default=0)} at some points"
        notes.append(f"{label}: mean of {sizes[label]} runs{fewer}; the band is from the lowest to the highest.")
    return replace(
        first,
        series=series,
        marks=[
            replace(mark, label=f"{label} {mark.label}", text=f"{label}: {mark.text}")
            for label, data in figures.items()
            for mark in data.marks
        ],
        notes=[*dict.fromkeys(notes)],
    )


def _mean_of(members: Sequence[Series]) -> Series:
    """Return the mean of runs at each x that any of them has, with the lowest and the highest as interval."""
    found = {
        x: [value for each in members if (value := _finite(each.values.get(x))) is not None]
        for x in sorted({x for each in members for x in each.values})
    }
    known = {x: values for x, values in found.items() if values}
    return Series(
        name=members[0].name,
        values={x: fmean(values) for x, values in known.items()},
        intervals={x: (min(values), max(values)) for x, values in known.items()},
        band=True,
    )
