"""Drawings and tables of series, worked by hand."""

import math
from collections.abc import Sequence

import pytest

from ludic.app.show.figures import FigureData, Mark, Series
from ludic.app.show.report.plots import HEIGHT, WIDTH, Figure, draw


def drawn(series: Sequence[Series], marks: Sequence[Mark] = ()) -> Figure:
    return draw(FigureData(name="loss", title="Loss", unit="nats", x_name="step", series=series, marks=marks))


def test_the_first_and_last_point_are_in_the_corners_of_the_drawing() -> None:
    figure = drawn([Series(name="reward", values={1: 0.0, 2: 4.0})])
    (line,) = figure.lines
    assert line.path == f"54.0,{HEIGHT - 22:.1f} {WIDTH - 12:.1f},14.0"
    assert [label for _, label in figure.y_ticks] == ["0", "1", "2", "3", "4"]
    assert figure.summary == [["reward", "0", "4", "0", "4", "2"]]
    assert figure.rows == [["1", "0"], ["2", "4"]]


def test_values_that_are_missing_or_not_finite_are_left_out_and_counted() -> None:
    values = {1: 1.0, 2: None, 3: math.nan, 4: math.inf, 5: 3.0}
    figure = drawn([Series(name="loss", values=values)])
    assert figure.rows == [["1", "1"], ["5", "3"]]
    assert figure.notes == ["3 values left out: missing, or not finite."]


def test_a_figure_without_any_value_has_no_lines() -> None:
    figure = drawn([Series(name="KL", values={1: None, 2: math.nan})])
    assert (figure.lines, figure.rows, figure.summary) == ([], [], [])


def test_long_series_are_drawn_as_means_and_summarized_from_all_values() -> None:
    # 240 values become 120 means of two: of 0 and 1, of 2 and 3, ...
    figure = drawn([Series(name="reward", values={step: float(step) for step in range(240)})])
    assert (len(figure.rows), figure.rows[0], figure.rows[-1]) == (120, ["1", "0.5"], ["239", "238.5"])
    assert figure.summary == [["reward", "0", "239", "0", "239", "119.5"]]
    assert figure.notes == ["Each point is the mean of 2 values."]


def test_series_of_other_x_share_a_table() -> None:
    series = [Series(name="a", values={1: 1.0, 2: 2.0}), Series(name="b", values={2: 5.0})]
    figure = drawn(series)
    assert (figure.header, figure.rows) == (["step", "a", "b"], [["1", "1", "-"], ["2", "2", "5"]])


def test_a_pointer_anywhere_finds_the_values_of_the_nearest_point() -> None:
    long = f"{'a' * 30}{'b' * 30}"
    series = [
        Series(name="a", values={0: 1.0, 2: 2.0, 8: 3.0}),
        Series(name=long, values={2: 5.0}, intervals={2: (4.0, 6.0)}),
    ]
    figure = drawn(series, [Mark(x=6, label="1", text="it begins")])
    # x from 0 to 8 is drawn from 54 to 408 of 420; the bands meet at 1 and at 5.
    edges = [(54 + 354 * x / 8) / 4.2 for x in (0, 1, 5, 8)]
    assert [float(stop.left[:-1]) for stop in figure.stops] == pytest.approx(edges[:-1], abs=0.01)
    lefts_and_widths = [float(stop.left[:-1]) + float(stop.width[:-1]) for stop in figure.stops]
    assert lefts_and_widths == pytest.approx(edges[1:], abs=0.02)
    assert [stop.guide for stop in figure.stops] == ["0%", "25%", "100%"]
    assert [(stop.x, stop.marks, stop.is_right) for stop in figure.stops] == [
        ("step 0", [], False),
        ("step 2", [], False),
        ("step 8", ["1"], True),
    ]
    short = f"{'a' * 20}…{'b' * 19}"
    assert [value[:3] for value in figure.stops[1].values] == [("c0 d0", "a", "2"), ("c1 d1", short, "5 (4 to 6)")]


def test_a_band_lies_between_its_bounds_and_is_averaged_as_its_line() -> None:
    values = dict.fromkeys(range(240), 1.0)
    band = Series(name="lr", values=values, intervals={x: (0.0, 2.0 + x % 2) for x in values}, band=True)
    (line,) = drawn([band]).lines
    assert line.bars == []
    points = line.band.split()
    # 120 points along the upper bound, whose means are 2.5, and back along the lower bound, which is 0
    assert len(points) == 240
    upper, lower = {point.split(",")[1] for point in points[:120]}, {point.split(",")[1] for point in points[120:]}
    assert (upper, lower) == ({f"{178 - 164 * 2.5 / 3:.1f}"}, {"178.0"})


def test_intervals_are_drawn_as_bars_and_lie_within_the_drawing() -> None:
    series = Series(name="env", values={0: 0.5, 3: 0.75}, intervals={0: (0.0, 1.0), 3: (None, None)})
    figure = drawn([series])
    ((x, low, high),) = figure.lines[0].bars
    assert (x, low, high) == ("54.0", f"{HEIGHT - 22:.1f}", "14.0")
    assert figure.rows == [["0", "0.5", "0", "1"], ["3", "0.75", *["cannot be estimated"] * 2]]


@pytest.mark.parametrize("value", [0.0, -3.0, 7e-9, 1e12])
def test_a_constant_is_drawn_between_round_ticks(value: float) -> None:
    figure = drawn([Series(name="constant", values={5: value})])
    heights = [float(place) for place, _ in figure.y_ticks]
    assert len(heights) >= 2
    assert min(heights) <= float(figure.lines[0].path.split(",")[1]) <= max(heights)


def test_marks_stand_at_their_x_if_it_is_after_the_first() -> None:
    marks = [Mark(x=x, label=f"{x}", text="it begins") for x in (1, 2, 3, 4)]
    figure = drawn([Series(name="reward", values={1: 0.0, 2: 5.0, 3: 1.0})], marks=marks)
    ((_, *middle), (right, *last)) = figure.marks
    assert (middle, last) == (["2", "it begins"], ["3", "it begins"])
    assert right == figure.lines[0].dots[-1][0]
    assert not figure.is_zero
    assert drawn([Series(name="failed", values={1: 0.0, 2: 0.0})]).is_zero
    assert not drawn([]).is_zero
