"""The catalogue of figures: what each is called, which SQL gives its numbers, its lines, axes and marks.

Page, report and matplotlib draw the same `FigureData`. Reads views of one root through a connection to it. Raises
ConfigError for an unknown figure or column, with the names that exist; QueryError if a file can't be read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import duckdb

from ludic.app.show.evaluations import measure_title
from ludic.app.show.watch import stored_diagnostics
from ludic.base import number
from ludic.errors import ConfigError, similar_names, unknown_name
from ludic.eval import Chosen, MeasureConfig, numbers, stored_versions
from ludic.records import Row
from ludic.root import Root
from ludic.root.rows import POPULATIONS
from ludic.root.sql import accuracy_by, ask, ask_table, by_column, components_by_environment, figure, steps_by
from ludic.run import Diagnostic

if TYPE_CHECKING:
    import polars as pl

Values = Mapping[float, float | None]
"""Values by x."""
ErrorBar = tuple[float | None, float | None]

COLOURS: Sequence[str] = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#1A1A1A", "#9000F0", "#603000", "#900060")
"""Colours of lines on light paper, in their order. The first ones are Okabe and Ito's for colour-blind readers; their
lighter ones, which vanish on white, are replaced by dark ones that are as far apart."""
DARK_COLOURS: Sequence[str] = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#FFFFFF", "#F0E442", "#E69F00", "#0F78BE")
"""Colours of the same lines on dark paper."""
NUM_DASHES = 5
"""Dash patterns of lines. 8 colours and 5 patterns tell 40 lines apart, also in print without colours."""


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
    run: str = ""
    """Label of the run, or of the group of runs; empty in a figure of one run."""


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

    def frame(self) -> "pl.DataFrame":
        """Return the points as a DataFrame: x_name, line, value, low, high; in a figure of several runs also run.

        value, low and high are Float64, null where unknown; step and version are Int64.
        """
        import polars as pl

        points = [(each, x) for each in self.series for x in sorted(each.values)]
        bounds = [(each.intervals or {}).get(x, (None, None)) for each, x in points]
        is_whole = all(float(x).is_integer() for _, x in points)
        runs = {"run": [each.run for each, _ in points]} if any(each.run for each in self.series) else {}
        columns = {
            self.x_name: pl.Series([x for _, x in points], dtype=pl.Int64 if is_whole else pl.Float64, strict=False),
            **{name: pl.Series(values, dtype=pl.String) for name, values in runs.items()},
            "line": pl.Series([each.name for each, _ in points], dtype=pl.String),
            "value": pl.Series([each.values[x] for each, x in points], dtype=pl.Float64, strict=False),
            "low": pl.Series([low for low, _ in bounds], dtype=pl.Float64, strict=False),
            "high": pl.Series([high for _, high in bounds], dtype=pl.Float64, strict=False),
        }
        return pl.DataFrame(columns)

    def to_json(self, runs: Sequence[str] = ()) -> dict[str, Any]:
        """Return plain values: lists as long as `x`, with None where a value is unknown or not finite.

        low and high are empty lists for a series without intervals. runs: as of `looks`, which numbers the colours and
        dash patterns of lines; a mark has its run's colour, None in a figure of one run.
        """
        xs = sorted({x for each in self.series for x in each.values})
        order = [*runs] or [*dict.fromkeys(each.run for each in self.series)]
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
                    "colour": colour,
                    "dash": dash,
                    "band": each.band,
                    "values": [_finite(each.values.get(x)) for x in xs],
                    "low": _bounds(each, xs, 0),
                    "high": _bounds(each, xs, 1),
                }
                for each, (colour, dash) in zip(self.series, looks(self.series, runs), strict=True)
            ],
            "marks": [
                {
                    "x": mark.x,
                    "label": mark.label,
                    "text": mark.text,
                    "colour": order.index(mark.run) % len(COLOURS) if mark.run in order and mark.run else None,
                }
                for mark in self.marks
            ],
            "notes": [*self.notes],
            "log_y": self.log_y,
        }


def looks(series: Sequence[Series], runs: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Return the numbers of each line's colour and dash pattern; pattern 0 is solid.

    Of several runs, the colour is the run's, and patterns tell its lines apart. runs: labels of all runs of a page, in
    their order, so that each has one colour in all figures; none takes those of the lines.
    """
    order = [*runs] or [*dict.fromkeys(each.run for each in series)]
    is_single = order == [""] or len({each.run for each in series}) == len(series)
    seen: dict[str, int] = {}
    found = []
    for index, each in enumerate(series):
        line = seen[each.run] = seen.get(each.run, -1) + 1
        colour = index if order == [""] else order.index(each.run)
        found.append((colour % len(COLOURS), (colour if is_single else line) % NUM_DASHES))
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _bounds(series: Series, xs: Sequence[float], side: Literal[0, 1]) -> list[float | None]:
    if series.intervals is None:
        return []
    return [_finite(series.intervals.get(x, (None, None))[side]) for x in xs]


# --- The catalogue ---------------------------------------------------------------------------------------------------

Source = Literal["steps", "considered", "components", "versions", "turns", "tools", "outcomes", "evaluation"]


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

    @property
    def is_marked(self) -> bool:
        """Whether the steps at which warnings begin are marked in it."""
        return self.x_name == "step" and self.source != "outcomes"


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
    FigureKind(
        name="reward_by_turn",
        title="Reward by turn",
        unit="mean of the environment's steps, of a step's considered rollouts",
        source="turns",
        columns={"turn": "reward_mean"},
    ),
    FigureKind(
        name="response_length_by_turn",
        title="Length by turn",
        unit="sampled tokens, mean of a step's considered rollouts",
        source="turns",
        columns={"turn": "tokens_mean"},
    ),
    FigureKind(
        name="tool_calls",
        title="Tool calls",
        unit="calls of a rollout, mean of a step's considered ones",
        source="tools",
        columns={"tool": "calls_mean"},
    ),
    FigureKind(
        name="tool_errors",
        title="Failed tool calls",
        unit="share of a step's calls",
        source="tools",
        columns={"tool": "error_fraction"},
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
    FigureKind(
        name="memory_gb",
        title="Memory",
        unit="GB, the most of rank 0 since its process began",
        columns={"memory": "memory_gb"},
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
_LAST_TURN = 8
"""Turns from this one on have one line."""
_MOST_TOOLS = 8
"""Number of the most frequent tools that have a line each."""
_MOST_LINES = 40


def figure_names() -> list[str]:
    """Return the names of all figures, in the order of the report."""
    return [kind.name for kind in FIGURES]


# --- The numbers of one run ------------------------------------------------------------------------------------------


def read_figure(
    con: duckdb.DuckDBPyConnection, root: Root, name: str, *, by: str | None = None, marks: Sequence[Mark] = ()
) -> FigureData:
    """Return a figure of a run by its name, or NAME/PART. Parts of a figure without a part in its name become one.

    by: a line for each value of this column of rollouts or of the data set, where the numbers are known by rollouts;
    other figures say in a note that they are of the whole run. marks: drawn over steps only. A figure without numbers
    has no series. Raises ConfigError for an unknown figure and for too many lines, QueryError for an unknown column.
    """
    parts = read_parts(con, root, name, by=by, marks=marks)
    return parts[0] if len(parts) == 1 else _joined(_kind_of(name), parts)


def read_parts(
    con: duckdb.DuckDBPyConnection, root: Root, name: str, *, by: str | None = None, marks: Sequence[Mark] = ()
) -> list[FigureData]:
    """Return a figure by its name as `read_figure` does, but each of its parts, such as measures, for itself.

    A part of a figure of which this run has none at all is the figure without series.
    """
    kind = _kind_of(name)
    part = name.partition("/")[2]
    if kind.split and part:
        by, part = part, ""
    elif by is not None:
        by_column(con, by)  # which refuses an unknown column, also where no number is known by it
    found = list(_of_kind(kind, _Rows(con=con, root=root), by))
    if part and found:
        found = [each for each in found if each.name == name] or _refuse_part(name, found, root)
    own = [*marks] if kind.is_marked else []
    return [replace(each, marks=own) for each in found] or [_joined(kind, [])]


def check_figure(name: str, others: Sequence[str] = ()) -> None:
    """Raise ConfigError for a name that no figure has, with those that exist. others: names besides these."""
    base = name.partition("/")[0]
    if all(kind.name != base for kind in FIGURES):
        known = [*others, *figure_names()]
        close = similar_names(name, known)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ConfigError(f"figure {name!r} is unknown; {hint}there are {', '.join(known)}")


def _kind_of(name: str) -> FigureKind:
    check_figure(name)
    return next(kind for kind in FIGURES if kind.name == name.partition("/")[0])


def _refuse_part(name: str, found: Sequence[FigureData], root: Root) -> NoReturn:
    raise ConfigError(f"{unknown_name('figure', name, [each.name for each in found])} in {root.url}")


def step_frame(con: duckdb.DuckDBPyConnection, root: Root, by: str | None = None) -> "pl.DataFrame":
    """Return the numbers of gradient steps as a DataFrame, with a row per step; the columns of figures/steps.sql.

    by: a row per step and value of this column, which is called so, or `value` if a number has its name already; then
    the columns are those of `ludic.root.sql.steps_by`.
    """
    import polars as pl

    if by is None:
        return pl.DataFrame(pl.from_arrow(ask_table(con, root, figure("steps"))))
    rows = steps_by(con, root, by)
    columns = [kind.split for kind in FIGURES if kind.split and kind.x_name == "step"]
    names = [name for name in (rows[0] if rows else columns) if name not in ("step", "value")]
    called = "value" if by in ("step", *names) else by
    values = pl.Series(called, [row["value"] for row in rows], strict=False)
    steps = pl.Series("step", [row["step"] for row in rows], pl.Int64)
    return pl.DataFrame([steps, values, *(pl.Series(name, [row[name] for row in rows], pl.Float64) for name in names)])


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
    if by is not None:
        by_column(con, by)
    is_agent = ask(con, root, "select coalesce(max(num_turns), 0) > 1 as several from rollouts")[0]["several"]
    left_out = {"evaluation", *(() if is_agent else ("turns", "tools"))}
    marks = diagnostic_marks(diagnostics)
    first: list[FigureData] = []
    later: list[FigureData] = []
    for kind in (kind for kind in FIGURES if kind.source not in left_out):
        # Of the curves of the whole run, those that can be split are shown both ways.
        for data in _of_kind(kind, rows, None if kind.source == "steps" else by):
            own = diagnostic_marks(diagnostics, data.name.partition("/")[2]) if kind.source == "components" else marks
            if len(data.series) < _FEWEST_LINES.get(kind.source, 0):
                continue
            (first if kind.name in _FIRST else later).append(replace(data, marks=own if kind.is_marked else []))
    if by is not None or len({row["value"] for row in rows.considered(ENVIRONMENT)}) > 1:
        kinds = [_kind_of(name) for name in _FIRST]
        first += [replace(data, marks=marks) for kind in kinds for data in _of_kind(kind, rows, by or ENVIRONMENT)]
    return [*first, *later]


_FIRST = ("reward_mean", "response_length_mean")
"""Figures that come first, and then once more by environment."""
_FEWEST_LINES: Mapping[Source, int] = {"versions": 1, "turns": 2, "tools": 1}
"""Lines of a figure below which a report leaves it out: one turn is shown by reward and length already."""


def read_diagnostics(con: duckdb.DuckDBPyConnection, root: Root) -> list[Diagnostic]:
    """Return the diagnostics of a run, those of far steps over all steps. con: a connection to it."""
    return stored_diagnostics(root, ask(con, root, figure("newest_metrics")))


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


def evaluation_figures(rows: Sequence[Row], confidence: float, *, only_changes: bool = True) -> Iterator[FigureData]:
    """Yield a figure over versions for each measure, with a line for each environment and evaluation.

    rows: of ludic.eval.Numbers. only_changes: leaves out measures of one version, and those that never change.
    """
    kind = _kind_of("evaluation")
    evaluations = {(row["env_name"], row["evaluation"]) for row in rows}
    has_several = len(evaluations) > len({env for env, _ in evaluations})
    for title in dict.fromkeys(map(measure_title, rows)):
        of_measure = [row for row in rows if measure_title(row) == title]
        counts = [len({row[name] for row in of_measure}) for name in ("estimate", "policy_version")]
        if only_changes and min(counts) < 2:
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
    _read: dict[tuple[str, ...], Sequence[Row]] = field(default_factory=dict)

    def steps(self) -> Sequence[Row]:
        return self._once(("steps",), lambda: ask(self.con, self.root, figure("steps")))

    def considered(self, by: str) -> Sequence[Row]:
        return self._once(("considered", by), lambda: _checked(steps_by(self.con, self.root, by), by))

    def versions(self, by: str) -> Sequence[Row]:
        return self._once(("versions", by), lambda: _checked(accuracy_by(self.con, self.root, by), by))

    def components(self) -> Sequence[Row]:
        return self._once(("components",), lambda: components_by_environment(self.con, self.root))

    def turns(self) -> Sequence[Row]:
        return self._once(("turns",), lambda: ask(self.con, self.root, figure("turns_by_step"), {"last": _LAST_TURN}))

    def tools(self) -> Sequence[Row]:
        return self._once(("tools",), lambda: ask(self.con, self.root, figure("tools_by_step"), {"most": _MOST_TOOLS}))

    def outcomes(self) -> Sequence[Row]:
        return self._once(("outcomes",), lambda: ask(self.con, self.root, figure("outcomes_by_step")))

    def measures(self) -> Sequence[Row]:
        versions = stored_versions(self.con, self.root, None)
        if not versions:
            return []
        return numbers(self.root, MeasureConfig(), Chosen(versions=versions), con=self.con).rows

    def _once(self, key: tuple[str, ...], read: Callable[[], Sequence[Row]]) -> Sequence[Row]:
        if key not in self._read:
            self._read[key] = read()
        return self._read[key]


def _checked(rows: Sequence[Row], by: str) -> Sequence[Row]:
    """Return the rows of each value of a column. Raises ConfigError for more values than lines can be told apart."""
    num_lines = len({row["value"] for row in rows})
    if by != ENVIRONMENT and num_lines > _MOST_LINES:
        raise ConfigError(
            f"column {by!r} has {num_lines:,} values, and a figure at most {_MOST_LINES} lines; name a column with "
            "fewer values, or group its values in SQL"
        )
    return rows


def _of_kind(kind: FigureKind, rows: _Rows, by: str | None) -> Iterator[FigureData]:
    """Yield the figures of a kind: one, or one for each part. by: None is by environment where that is usual."""
    make = partial(FigureData, unit=kind.unit, x_name=kind.x_name, log_y=kind.log_y)
    notes = [kind.note] if kind.note else []
    if by is not None and not kind.split:
        notes.append(f"Not by {by}: these numbers are known of the whole run only.")
    match kind.source:
        case "steps" if by is None or not kind.split:
            found = rows.steps()
            series = [
                Series(name=name, values={row["step"]: row[column] for row in found})
                for name, column in kind.columns.items()
            ]
            yield make(name=kind.name, title=kind.title, series=series if found else [], notes=notes)
        case "steps" | "considered" | "versions":
            yield _split(kind, rows, by)
        case "components":
            found = rows.components()
            for env_name in dict.fromkeys(row[ENVIRONMENT] for row in found):
                own = [row for row in found if row[ENVIRONMENT] == env_name]
                series = _lines(own, "step", "component", "value_mean")
                title = f"{kind.title} in {env_name}"
                yield make(name=f"{kind.name}/{env_name}", title=title, series=series, notes=notes)
        case "turns" | "tools":
            found = rows.turns() if kind.source == "turns" else rows.tools()
            ((group, column),) = kind.columns.items()
            series = _lines(found, "step", group, column, _turn_name if group == "turn" else _tool_name)
            yield make(name=kind.name, title=kind.title, series=_known(series), notes=notes)
        case "outcomes":
            found = rows.outcomes()
            notes += [] if any(row["outcome"] != "used" for row in found) else ["No rollout was dropped."]
            yield make(name=kind.name, title=kind.title, series=_outcomes(found), notes=notes)
        case "evaluation":
            found = rows.measures()
            for data in evaluation_figures(found, MeasureConfig().confidence, only_changes=False):
                yield replace(data, notes=notes)


def _split(kind: FigureKind, rows: _Rows, by: str | None) -> FigureData:
    """Return a figure with a line for each value of a column. by: None is by environment."""
    column = by or ENVIRONMENT
    found = rows.versions(column) if kind.source == "versions" else rows.considered(column)
    title = kind.title
    if by is not None and (by != ENVIRONMENT or kind.source == "steps"):
        title = f"{kind.title} by {'environment' if by == ENVIRONMENT else by}"
    return FigureData(
        name=kind.name if by is None else f"{kind.name}/{by}",
        title=title,
        unit=kind.split_unit or kind.unit,
        x_name=kind.x_name,
        series=_known(_lines(found, kind.x_name, "value", kind.split)),
        notes=[kind.note] if kind.note else [],
        log_y=kind.log_y,
    )


def _known(series: Sequence[Series]) -> Sequence[Series]:
    """Return the lines of a figure; none if all of its values are unknown."""
    return series if any(value is not None for each in series for value in each.values.values()) else []


def _lines(
    rows: Sequence[Row], x: str, group: str, column: str, name: Callable[[Any], str] | None = None
) -> list[Series]:
    """Return a line for each value of a column, in the order of the values: numbers first, NULL last."""
    found: dict[Any, dict[float, float | None]] = {}
    for row in rows:
        found.setdefault(row[group], {})[row[x]] = row[column]
    return [Series(name=(name or _value_name)(value), values=found[value]) for value in sorted(found, key=_order)]


def _order(value: Any) -> tuple[int, float, str]:
    if value is None:
        return 3, 0.0, ""
    try:
        if not math.isnan(number_of := float(value)):
            return 0, number_of, str(value)
    except (TypeError, ValueError):
        pass
    return 1, 0.0, str(value)


def _value_name(value: Any) -> str:
    if value is None:
        return "(no value)"
    if isinstance(value, bool):
        return str(value).lower()
    return number(value) if isinstance(value, float) else str(value)


def _turn_name(turn: int) -> str:
    return f"turn {turn} and later" if turn == _LAST_TURN else f"turn {turn}"


def _tool_name(name: str | None) -> str:
    return "(all other tools)" if name is None else name


def _outcomes(rows: Sequence[Row]) -> list[Series]:
    steps = sorted({row["step"] for row in rows})
    counts = {(row["step"], row["outcome"]): row["num_rollouts"] for row in rows}
    names = dict.fromkeys(row["outcome"] for row in rows)
    return [Series(name=name, values={step: counts.get((step, name), 0) for step in steps}) for name in names]


def _joined(kind: FigureKind, parts: Sequence[FigureData]) -> FigureData:
    """Return the parts of a figure as one; without parts, a figure without lines."""
    series = [
        replace(each, name=f"{part.name.partition('/')[2]}: {each.name}") for part in parts for each in part.series
    ]
    return FigureData(
        name=kind.name,
        title=kind.title,
        unit=parts[0].unit if parts else kind.unit.format(confidence=100 * MeasureConfig().confidence),
        x_name=kind.x_name,
        series=series,
        marks=parts[0].marks if parts else (),
        notes=[*dict.fromkeys(note for part in parts for note in part.notes)],
        log_y=kind.log_y,
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
    notes += [f"{label}: no values." for label, data in figures.items() if not data.has_values]
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
            replace(mark, label=f"{label} {mark.label}", run=groups.get(label, label))
            for label, data in figures.items()
            for mark in data.marks
        ],
        notes=[*dict.fromkeys(notes)],
    )


def overlays(figures: Mapping[str, Sequence[FigureData]], groups: Mapping[str, str] | None = None) -> list[FigureData]:
    """Return each figure that any run has, of all runs that have it; see `overlay`. figures: by the run's label."""
    by_name: dict[str, dict[str, FigureData]] = {}
    for label, of_run in figures.items():
        for data in of_run:
            by_name.setdefault(data.name, {})[label] = data
    return [overlay(of_runs, groups) for of_runs in by_name.values()]


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


def short_labels(urls: Sequence[str]) -> list[str]:
    """Return the shortest ends of the URLs, whole folders long, by which all of them are told apart."""
    parts = [url.rstrip("/").split("/") for url in urls]
    for size in range(1, max(map(len, parts), default=1) + 1):
        labels = ["/".join(each[-size:]) for each in parts]
        if len(set(labels)) == len(urls):
            return labels
    return [*urls]
