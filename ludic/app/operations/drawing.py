"""Draw figures with matplotlib: one axes for each, without pyplot, so that no backend is needed and none is changed.

Names of a run are hostile: they are shown as text, never as mathtext or TeX, and a leading underscore hides none of
them. Imported only by plots.py, when a plot is asked for.
"""

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from ludic.app.show.figures import COLOURS, DARK_COLOURS, FigureData, Series
from ludic.base.results import printable

_STYLES = ("-", "--", "-.", ":")
_MOST_DOTS = 40
"""Lines of up to this many points have a dot at each."""
_MOST_INSIDE = 6
"""Number of lines up to which the legend stands among the data."""
_LONGEST_NAME = 60
_LABEL_ROOM = 0.03
"""Share of the width of an axes between two labels of marks."""
_WARNING = "#B3261E"
_DPI = 110


class Plot(Figure):
    """A matplotlib figure that notebooks show, whichever backend they have."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=_DPI)
        return file.getvalue()


def draw(figures: Sequence[FigureData]) -> Plot:
    """Return a figure with one axes for each of `figures`; those over steps share their x axis, and so on.

    Up to three stand below each other, more in two columns. Marks are vertical lines, with their texts at the bottom.
    """
    num_columns = 1 if len(figures) <= 3 else 2
    num_rows = math.ceil(len(figures) / num_columns)
    plot = Plot(figsize=(7.5 * num_columns, 0.6 + 2.7 * num_rows), layout="constrained")
    first: dict[str, Axes] = {}
    for index, data in enumerate(figures, 1):
        axes = plot.add_subplot(num_rows, num_columns, index, sharex=first.get(data.x_name))
        first.setdefault(data.x_name, axes)
        _draw_axes(axes, data)
    warnings = [*dict.fromkeys(f"{mark.label}: {mark.text}" for data in figures for mark in data.marks)]
    if warnings:
        text = _wrapped(warnings, 115 * num_columns)
        _plain(plot.supxlabel(text, x=0.01, ha="left", fontsize=7, color=_WARNING))
    return plot


def _draw_axes(axes: Axes, data: FigureData) -> None:
    _plain(axes.set_title(_short(data.title), loc="left", fontsize=10))
    _plain(axes.set_ylabel("\n".join(textwrap.wrap(printable(data.unit), 32)), fontsize=8))
    _plain(axes.set_xlabel(_short(data.x_name), fontsize=8))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if data.log_y:
        axes.set_yscale("log")
    if data.x_name in ("step", "version"):
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    if not data.has_values:
        missing = axes.text(0.5, 0.5, "no values in this run", transform=axes.transAxes, ha="center", va="center")
        _plain(missing)
    lines = [_draw_line(axes, each, *look) for each, look in zip(data.series, _looks(data.series), strict=True)]
    labelled = _labelled(data)
    for mark in data.marks:
        axes.axvline(mark.x, color=_WARNING, linestyle="--", linewidth=0.8, label="_mark")
        top = axes.get_xaxis_transform()
        if mark.x in labelled:
            label = axes.text(mark.x, 1.0, _short(mark.label), transform=top, color=_WARNING, fontsize=7)
            label.set(ha="center", va="bottom")
            _plain(label)
    # A single line needs no legend where the title says what it is.
    if len(lines) > 1 or any(each.run or each.name.lower() not in data.title.lower() for each in data.series):
        _draw_legend(axes, lines, data.series)
    if data.notes:
        text = _wrapped(data.notes, 110)
        _plain(axes.annotate(text, (0, 0), (0, -30), "axes fraction", "offset points", va="top", fontsize=7, alpha=0.7))


def _labelled(data: FigureData) -> set[float]:
    """Return where marks have room for their labels; none in a figure of several runs, whose marks are too close."""
    if len({each.run for each in data.series}) > 1:
        return set()
    xs = [x for each in data.series for x in each.values] + [mark.x for mark in data.marks]
    places: list[float] = []
    for x in sorted({mark.x for mark in data.marks}):
        if not places or x - places[-1] >= _LABEL_ROOM * (max(xs) - min(xs)):
            places.append(x)
    return set(places)


def _draw_line(axes: Axes, series: Series, colour: str, style: str) -> Line2D:
    xs = sorted(series.values)
    ys = [_number(series.values[x]) for x in xs]
    marker = "o" if len(xs) <= _MOST_DOTS else ""
    (line,) = axes.plot(xs, ys, color=colour, linestyle=style, marker=marker, markersize=3, linewidth=1.4)
    line.set_label(series.name)
    bounds = {x: tuple(map(_number, bound)) for x, bound in sorted((series.intervals or {}).items())}
    if bounds:
        lows, highs = zip(*bounds.values(), strict=True)
        if series.band:
            axes.fill_between([*bounds], lows, highs, color=colour, alpha=0.18, linewidth=0)
        else:
            axes.vlines([*bounds], lows, highs, color=colour, linewidth=1.0)
    return line


def _looks(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Return colour and style of each line; in a figure of several runs, each run has one colour."""
    colours = DARK_COLOURS if _is_dark() else COLOURS
    runs = [*dict.fromkeys(each.run for each in series)]
    if runs == [""]:
        places = [(index, index // len(colours)) for index in range(len(series))]
    else:
        places = [
            (runs.index(each.run), sum(other.run == each.run for other in series[:index]))
            for index, each in enumerate(series)
        ]
    return [(colours[hue % len(colours)], _STYLES[style % len(_STYLES)]) for hue, style in places]


def _is_dark() -> bool:
    red, green, blue = to_rgb(mpl.rcParams["axes.facecolor"])
    return 0.3 * red + 0.6 * green + 0.1 * blue < 0.5


def _draw_legend(axes: Axes, lines: Sequence[Line2D], series: Sequence[Series]) -> None:
    place: dict[str, Any] = {"loc": "best"}
    if len(lines) > _MOST_INSIDE:
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    # A legend leaves out names that begin with an underscore, so the names follow.
    legend = axes.legend(lines, [str(index) for index in range(len(lines))], fontsize=7, framealpha=0.6, **place)
    for text, each in zip(legend.get_texts(), series, strict=True):
        text.set_text(_short(each.name))
        _plain(text)


def _plain(text: Text) -> None:
    """Show a text as it is: neither $...$ nor TeX, which could read files, is interpreted."""
    text.set_parse_math(False)
    text.set_usetex(False)


def _short(name: str) -> str:
    shown = printable(name).replace("\n", "\\n")
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…"


def _wrapped(texts: Sequence[str], width: int) -> str:
    lines = [line for text in texts for each in text.splitlines() for line in textwrap.wrap(printable(each), width)]
    return "\n".join(lines)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
