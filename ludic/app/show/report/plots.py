"""Draw the numbers of a figure: lines in SVG units, ticks, what a pointer over a point shows, and tables. Pure.

Values that are missing or not finite are left out and counted. Long series are drawn as means of consecutive points.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from ludic.app.show.figures import COLOURS, NUM_DASHES, ErrorBar, FigureData, Mark, Series, Values, looks
from ludic.base import NOT_ESTIMATED, number, plural

WIDTH, HEIGHT = 420, 200
"""Size of a drawing, in the units of its viewBox."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 14, 22
_MOST_POINTS = 120
_MOST_DOTS = 40
"""Lines of up to this many points are drawn with a dot at each."""
_DIGITS = 4
_MOST_VALUES = 12
"""Number of lines, those of the highest values, whose values a pointer shows."""
_LONGEST_NAME = 40
"""Characters of a name beside a point; the legend has it in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """A series in the units of the drawing."""

    name: str
    style: str
    """Classes of its colour and its dash pattern."""
    path: str
    """Points of a polyline."""
    dots: Sequence[tuple[str, str]]
    """x and y of each point; empty for a long line."""
    bars: Sequence[tuple[str, str, str]]
    """x, lower and upper y of each interval."""
    band: str
    """Points of a polygon between lower and upper bounds; empty if the intervals are no band."""
    ends: tuple[str, str]
    """First and last value, of all that are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A band of the drawing's whole height in which a pointer shows the values of one x. In percent of the drawing."""

    left: str
    width: str
    guide: str
    """Place of the x, in percent of the band's width."""
    is_right: bool
    """Whether it lies in the right half, so that its text stands to its left."""
    x: str
    marks: Sequence[str]
    """Labels of the marks in the band."""
    values: Sequence[tuple[str, str, str, str]]
    """Style, name, value and height from the top of the lines that have a value at this x, at most 12."""
    num_more: int
    """Number of lines that have a value here and are not among `values`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing, and the tables of its numbers."""

    name: str
    title: str
    unit: str
    x_name: str
    lines: Sequence[PlotLine]
    stops: Sequence[Stop]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Binned:
    """A series, its finite values, and the means of its bins by their x."""

    series: Series
    style: str
    finite: Mapping[float, float]
    means: Mapping[float, float]
    bounds: Mapping[float, tuple[float, float]]
    """Means of the lower and of the upper bounds of each bin, where both are known."""


def draw(data: FigureData, runs: Sequence[str] = ()) -> Figure:
    """Draw a figure's numbers. One without any finite value has no lines.

    Marks after the first x and up to the last one are drawn. runs: labels of all runs of a page of several, in their
    order: each has one colour in all of its figures.
    """
    finite = [(each, _finite(each.values)) for each in data.series]
    shown = [(each, values) for each, values in finite if values]
    num_left_out = sum(len(each.values) - len(values) for each, values in shown)
    bins = _bins(sorted({x for _, values in shown for x in values}))
    styles = [style(*look) for look in looks([each for each, _ in shown], runs)]
    binned = [_binned(style, each, values, bins) for style, (each, values) in zip(styles, shown, strict=True)]
    scale = _Scale.of(binned)
    xs = sorted({x for each in binned for x in each.means})
    marks = [mark for mark in data.marks if scale.holds(mark.x)]
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
        lines=[_line(each, scale) for each in binned],
        stops=[*_stops(xs, binned, scale, data.x_name, marks)],
        marks=[(f"{scale.x(mark.x):.1f}", mark.label, mark.text) for mark in marks],
        x_ticks=[(f"{scale.x(tick):.1f}", _text(tick)) for tick in _ticks(*scale.xs, whole=True)],
        y_ticks=[(f"{scale.y(tick):.1f}", _text(tick)) for tick in _ticks(*scale.ys)],
        summary=[_summary(each.series.name, each.finite) for each in binned],
        header=[data.x_name, *(name for each in binned for name in _names(each.series))],
        rows=[_row(x, binned) for x in xs],
        notes=notes,
        is_zero=bool(shown) and not any(value for _, values in shown for value in values.values()),
    )


def _binned(style: str, series: Series, finite: Mapping[float, float], bins: Sequence[Sequence[float]]) -> _Binned:
    intervals = series.intervals or {}
    sides = [_finite({x: bounds[side] for x, bounds in intervals.items()}) for side in (0, 1)]
    lows, highs = (_means(side, bins) for side in sides)
    return _Binned(
        series=series,
        style=style,
        finite=finite,
        means=_means(finite, bins),
        bounds={x: (low, highs[x]) for x, low in lows.items() if x in highs},
    )


def style(colour: int, dash: int | None = None) -> str:
    """Return the classes of a line's colour and dash pattern, by their numbers. Those of number 0 are solid."""
    return f"c{colour % len(COLOURS)} d{(colour if dash is None else dash) % NUM_DASHES}"


@dataclass(frozen=True, slots=True)
class _Scale:
    xs: tuple[float, float]
    ys: tuple[float, float]

    @classmethod
    def of(cls, binned: Iterable[_Binned]) -> "_Scale":
        xs: list[float] = []
        ys: list[float] = []
        for each in binned:
            xs += each.means
            ys += each.means.values()
            ys += [bound for x in each.means for bound in each.bounds.get(x, ())]
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


def _line(it: _Binned, scale: _Scale) -> PlotLine:
    points = [(f"{scale.x(x):.1f}", f"{scale.y(y):.1f}") for x, y in it.means.items()]
    bounds = [
        (f"{scale.x(x):.1f}", f"{scale.y(it.bounds[x][0]):.1f}", f"{scale.y(it.bounds[x][1]):.1f}")
        for x in it.means
        if x in it.bounds
    ]
    ends = it.finite[min(it.finite)], it.finite[max(it.finite)]
    around = [f"{x},{high}" for x, _, high in bounds] + [f"{x},{low}" for x, low, _ in reversed(bounds)]
    return PlotLine(
        name=it.series.name,
        style=it.style,
        path=" ".join(f"{x},{y}" for x, y in points),
        dots=points if len(points) <= _MOST_DOTS else [],
        bars=[] if it.series.band else bounds,
        band=" ".join(around) if it.series.band else "",
        ends=(_text(ends[0]), _text(ends[1])),
    )


def _stops(
    xs: Sequence[float], binned: Sequence[_Binned], scale: _Scale, x_name: str, marks: Sequence[Mark]
) -> Iterator[Stop]:
    """Yield a band for each x, from the middle before it to the middle after it."""
    places = [scale.x(x) for x in xs]
    edges = [_LEFT, *((before + after) / 2 for before, after in pairwise(places)), WIDTH - _RIGHT]
    for x, place, (left, right) in zip(xs, places, pairwise(edges), strict=False):
        known = [each for each in binned if x in each.means]
        listed = sorted(known, key=lambda each: -each.means[x])[:_MOST_VALUES] if len(known) > _MOST_VALUES else known
        yield Stop(
            left=_percent(left / WIDTH),
            width=_percent((right - left) / WIDTH),
            guide=_percent((place - left) / ((right - left) or 1.0)),
            is_right=place > (_LEFT + WIDTH - _RIGHT) / 2,
            x=f"{x_name} {_text(x)}",
            marks=[mark.label for mark in marks if left < scale.x(mark.x) <= right],
            values=[
                (each.style, _short(each.series.name), _value(each, x), _percent(scale.y(each.means[x]) / HEIGHT))
                for each in listed
            ],
            num_more=len(known) - len(listed),
        )


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _short(name: str) -> str:
    """Leave out the middle of a long name."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half + 1 :]}"


def _value(it: _Binned, x: float) -> str:
    """Format a value, with its interval if there is one."""
    if x not in it.bounds:
        return _text(it.means[x])
    low, high = it.bounds[x]
    return f"{_text(it.means[x])} ({_text(low)} to {_text(high)})"


def _summary(name: str, values: Mapping[float, float]) -> list[str]:
    of = [values[x] for x in sorted(values)]
    return [name, *(_text(each) for each in (of[0], of[-1], min(of), max(of), fmean(of)))]


def _names(series: Series) -> list[str]:
    return [series.name] if series.intervals is None else [series.name, "from", "to"]


def _row(x: float, binned: Iterable[_Binned]) -> list[str]:
    cells = [_text(x)]
    for each in binned:
        cells.append(_text(each.means.get(x)))
        if each.series.intervals is not None:
            bounds: ErrorBar = each.bounds.get(x, (None, None))
            cells += [NOT_ESTIMATED if bound is None and x in each.means else _text(bound) for bound in bounds]
    return cells


def _text(value: float | None) -> str:
    """Format a number with four digits; from 1,000 on as an integer, with commas."""
    return f"{value:,.0f}" if value is not None and 1000 <= abs(value) < 1e15 else number(value, _DIGITS)


def _finite(values: Values) -> dict[float, float]:
    return {x: y for x, y in values.items() if y is not None and math.isfinite(y)}
