"""Draw the numbers of a figure: lines in SVG units, ticks, and tables of the same numbers. Pure.

Values that are missing or not finite are left out and counted. Long series are drawn as means of consecutive points.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ludic.app.show.figures import FigureData, Series, Values
from ludic.base import NOT_ESTIMATED, number, plural

WIDTH, HEIGHT = 420, 200
"""Size of a drawing, in the units of its viewBox."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 8, 22
_MOST_POINTS = 120
_MOST_DOTS = 40
"""Lines of up to this many points are drawn with a dot at each."""
_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """A series in the units of the drawing."""

    name: str
    path: str
    """Points of a polyline."""
    dots: Sequence[tuple[str, str, str]]
    """x, y, and the text that a pointer over the dot shows."""
    bars: Sequence[tuple[str, str, str]]
    """x, lower and upper y of each interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing, and the tables of its numbers."""

    name: str
    title: str
    unit: str
    x_name: str
    lines: Sequence[PlotLine]
    marks: Sequence[tuple[str, str, str]]
    """x, label and text of each mark."""
    x_ticks: Sequence[tuple[str, str]]
    y_ticks: Sequence[tuple[str, str]]
    summary: Sequence[Sequence[str]]
    """Name, first, last, lowest, highest and mean of each series."""
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The numbers that are drawn."""
    notes: Sequence[str]
    is_zero: bool
    """True if the figure has values, and all of them are 0."""


def draw(data: FigureData) -> Figure:
    """Draw a figure's numbers. One without any finite value has no lines.

    Marks after the first x and up to the last one are drawn.
    """
    finite = [(each, _finite(each.values)) for each in data.series]
    shown = [(each, values) for each, values in finite if values]
    num_left_out = sum(len(each.values) - len(values) for each, values in shown)
    bins = _bins(sorted({x for _, values in shown for x in values}))
    binned = [(each, _means(values, bins)) for each, values in shown]
    scale = _Scale.of(binned)
    notes = [*data.notes]
    if bins and len(bins[0]) > 1:
        notes.append(f"Each point is the mean of {len(bins[0])} values.")
    if num_left_out:
        notes.append(f"{plural(num_left_out, 'value')} left out: missing, or not finite.")
    return Figure(
        name=data.name,
        title=data.title,
        unit=data.unit,
        x_name=data.x_name,
        lines=[_line(each, values, scale) for each, values in binned],
        marks=[(f"{scale.x(mark.x):.1f}", mark.label, mark.text) for mark in data.marks if scale.holds(mark.x)],
        x_ticks=[(f"{scale.x(tick):.1f}", _text(tick)) for tick in _ticks(*scale.xs, whole=True)],
        y_ticks=[(f"{scale.y(tick):.1f}", _text(tick)) for tick in _ticks(*scale.ys)],
        summary=[_summary(each.name, values) for each, values in shown],
        header=[data.x_name, *(name for each, _ in binned for name in _names(each))],
        rows=[_row(x, binned) for x in sorted({x for _, values in binned for x in values})],
        notes=notes,
        is_zero=bool(shown) and not any(value for _, values in shown for value in values.values()),
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    xs: tuple[float, float]
    ys: tuple[float, float]

    @classmethod
    def of(cls, binned: Iterable[tuple[Series, Mapping[float, float]]]) -> "_Scale":
        xs: list[float] = []
        ys: list[float] = []
        for each, values in binned:
            xs += values
            ys += values.values()
            bounds = [bound for x in values for bound in (each.intervals or {}).get(x, ())]
            ys += _finite(dict(enumerate(bounds))).values()
        low, high = _range(ys)
        step = _tick_step(low, high)
        return cls(_range(xs), (math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step))

    def x(self, value: float) -> float:
        low, high = self.xs
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def holds(self, x: float) -> bool:
        """Return whether an x lies after the first and up to the last one."""
        low, high = self.xs
        return low < x <= high

    def y(self, value: float) -> float:
        low, high = self.ys
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value, apart from each other."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        half = abs(high) / 2 or 0.5
        return low - half, high + half
    return low, high


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return three to six round numbers of a range."""
    step = _tick_step(low, high)
    step = max(1.0, step) if whole else step
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _tick_step(low: float, high: float) -> float:
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)


def _bins(xs: Sequence[float]) -> list[Sequence[float]]:
    size = math.ceil(len(xs) / _MOST_POINTS)
    return [xs[start : start + size] for start in range(0, len(xs), size)] if xs else []


def _means(values: Mapping[float, float], bins: Iterable[Sequence[float]]) -> dict[float, float]:
    """Return the mean of each bin by its middle x; a bin without values is left out."""
    found = {xs[len(xs) // 2]: [values[x] for x in xs if x in values] for xs in bins}
    return {x: fmean(of_bin) for x, of_bin in found.items() if of_bin}


def _line(series: Series, values: Mapping[float, float], scale: _Scale) -> PlotLine:
    points = [(f"{scale.x(x):.1f}", f"{scale.y(y):.1f}") for x, y in values.items()]
    texts = [f"{_text(x)}: {_text(y)}" for x, y in values.items()]
    bounds = {x: bound for x, bound in (series.intervals or {}).items() if x in values and all(map(_is_finite, bound))}
    return PlotLine(
        name=series.name,
        path=" ".join(f"{x},{y}" for x, y in points),
        dots=[(*place, text) for place, text in zip(points, texts, strict=True)] if len(points) <= _MOST_DOTS else [],
        bars=[
            (f"{scale.x(x):.1f}", f"{scale.y(low or 0.0):.1f}", f"{scale.y(high or 0.0):.1f}")
            for x, (low, high) in bounds.items()
        ],
    )


def _summary(name: str, values: Mapping[float, float]) -> list[str]:
    of = [values[x] for x in sorted(values)]
    return [name, *(_text(each) for each in (of[0], of[-1], min(of), max(of), fmean(of)))]


def _names(series: Series) -> list[str]:
    return [series.name] if series.intervals is None else [series.name, "from", "to"]


def _row(x: float, binned: Iterable[tuple[Series, Mapping[float, float]]]) -> list[str]:
    cells = [_text(x)]
    for each, values in binned:
        cells.append(_text(values.get(x)))
        if each.intervals is not None:
            bounds = each.intervals.get(x, (None, None))
            cells += [NOT_ESTIMATED if bound is None and x in values else _text(bound) for bound in bounds]
    return cells


def _text(value: float | None) -> str:
    """Format a number with four digits; from 1,000 on as an integer, with commas."""
    return f"{value:,.0f}" if value is not None and 1000 <= abs(value) < 1e15 else number(value, _DIGITS)


def _finite(values: Values) -> dict[float, float]:
    return {x: y for x, y in values.items() if y is not None and math.isfinite(y)}


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
