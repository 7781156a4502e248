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
    assert line.path == f"54.0,{HEIGHT - 22:.1f} {WIDTH - 12:.1f},8.0"
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


def test_intervals_are_drawn_as_bars_and_lie_within_the_drawing() -> None:
    series = Series(name="env", values={0: 0.5, 3: 0.75}, intervals={0: (0.0, 1.0), 3: (None, None)})
    figure = drawn([series])
    ((x, low, high),) = figure.lines[0].bars
    assert (x, low, high) == ("54.0", f"{HEIGHT - 22:.1f}", "8.0")
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
