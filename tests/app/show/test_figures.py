"""Figures: numbers of the golden root worked by hand, several runs over each other, and matplotlib's drawings."""

import ast
import math
import re
import shutil
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import duckdb
import polars as pl
import pytest
from matplotlib.colors import to_hex

import ludic
from ludic.app.operations.drawing import Plot, draw
from ludic.app.show import figures
from ludic.app.show.figures import (
    COLOURS,
    DARK_COLOURS,
    FIGURES,
    FigureData,
    Mark,
    Series,
    figure_names,
    looks,
    overlay,
    read_figure,
    read_figures,
    read_parts,
    short_labels,
)
from ludic.errors import ConfigError, MissingPackageError, QueryError
from ludic.root.root import Root
from ludic.root.sql.connection import Connections

GOLDEN = str(Path(__file__).parents[2] / "golden/v1.8")
HOSTILE = "_<b>$\\frac{1}{0}$ \x1b[31m"
"""Hidden from a legend, markup, not valid as mathtext, and an escape sequence."""


@pytest.fixture(scope="module")
def root() -> Root:
    """Steps 1 and 2 considered rewards 1, 0, 0.5, and 2, 0 (dropped: truncated), -1; version 3 was evaluated."""
    return Root.open(GOLDEN)


@pytest.fixture(scope="module")
def con(root: Root) -> Iterator[duckdb.DuckDBPyConnection]:
    with Connections() as connections:
        yield connections.to(root)


def values_of(data: FigureData) -> dict[str, dict[float, float | None]]:
    return {each.name: dict(each.values) for each in data.series}


@pytest.mark.slow
def test_all_figures_of_a_run_are_read_in_the_order_of_the_report(con: duckdb.DuckDBPyConnection, root: Root) -> None:
    found = {each.name: each for each in read_figures(con, root)}
    assert [*dict.fromkeys(name.partition("/")[0] for name in found)] == [
        name
        for name in figure_names()
        if name not in ("reward_by_turn", "response_length_by_turn", "tool_calls", "tool_errors", "evaluation")
    ]
    assert values_of(found["outcomes"]) == {"used": {1: 3, 2: 2}, "dropped by drop_truncated": {1: 0, 2: 1}}
    assert values_of(found["truncated_fraction"]) == {"moar_cats": {1: 0.0, 2: pytest.approx(1 / 3)}}
    assert values_of(found["reward_components/moar_cats"])["num_cats"] == {1: 0.5, 2: pytest.approx(1 / 3)}
    again = {name: read_figure(con, root, name) for name in found}
    assert again == found


@pytest.mark.slow
def test_a_figure_has_a_line_for_each_value_of_a_column(con: duckdb.DuckDBPyConnection, root: Root) -> None:
    by_index = read_figure(con, root, "reward_mean", by="group_index")
    assert (by_index.name, by_index.title) == ("reward_mean/group_index", "Reward by group_index")
    assert values_of(by_index) == {"0": {1: 1.0, 2: 2.0}, "1": {1: 0.0, 2: 0.0}, "2": {1: 0.5, 2: -1.0}}
    assert read_figure(con, root, "reward_mean/group_index") == by_index
    assert values_of(read_figure(con, root, "accuracy", by="group_index"))["0"] == {3: 1.0, 4: None}
    of_run = read_figure(con, root, "loss", by="group_index")
    assert values_of(of_run) == {"loss": {1: -0.125}}
    assert of_run.notes == ["Not by group_index: these numbers are known of the whole run only."]
    names = {each.name for each in read_figures(con, root, by="group_index")}
    assert {"reward_mean", "reward_mean/group_index", "signal/group_index", "loss"} <= names


@pytest.mark.slow
def test_what_can_not_be_plotted_is_refused_by_name(
    con: duckdb.DuckDBPyConnection, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"figure 'entropi' is unknown; did you mean 'entropy'\? there are reward_mean, "
    ):
        read_figure(con, root, "entropi")
    with pytest.raises(ConfigError, match=r"'evaluation/reward' is unknown; .*'evaluation/mean_reward'"):
        read_figure(con, root, "evaluation/reward")
    for name in ("reward_mean", "loss"):  # also where the numbers are of the whole run
        with pytest.raises(QueryError, match="column 'group_inde' is unknown; did you mean 'group_index'"):
            read_figure(con, root, name, by="group_inde")
    monkeypatch.setattr(figures, "_MOST_LINES", 2)
    with pytest.raises(ConfigError, match="'group_index' has 3 values, and a figure at most 2 lines"):
        read_figure(con, root, "reward_mean", by="group_index")


@pytest.mark.slow
def test_evaluations_are_read_by_measure_with_their_intervals(con: duckdb.DuckDBPyConnection, root: Root) -> None:
    parts = {each.name: each for each in read_parts(con, root, "evaluation")}
    assert {"evaluation/mean_reward", "evaluation/success_rate"} <= {*parts}
    (line,) = parts["evaluation/mean_reward"].series
    assert (line.name, line.values, line.intervals) == ("moar_cats", {3: 3.0}, {3: (None, None)})
    assert values_of(read_figure(con, root, "evaluation"))["mean_reward: moar_cats"] == {3: 3.0}


def figure(*series: Series, **options: object) -> FigureData:
    shown = {"name": "loss", "title": "Loss", "unit": "nats", "x_name": "step", **options}
    return FigureData(series=series, **shown)  # type: ignore[arg-type]


def test_json_has_lists_as_long_as_x_and_none_in_gaps() -> None:
    known = Series(name="a", values={1: 0.5, 3: math.nan}, intervals={1: (0.0, math.inf)})
    data = figure(known, Series(name="b", values={2: None, 3: 4.0}, run="r"), marks=[Mark(x=2, label="1", text="it")])
    found = data.to_json()
    assert found["x"] == [1, 2, 3]
    assert found["series"] == [
        {"name": "a", "run": "", "colour": 0, "dash": 0, "band": False, "values": [0.5, None, None]}
        | {"low": [0.0, None, None], "high": [None, None, None]},
        {"name": "b", "run": "r", "colour": 1, "dash": 1, "band": False, "values": [None, None, 4.0]}
        | {"low": [], "high": []},
    ]
    assert found["marks"] == [{"x": 2, "label": "1", "text": "it", "colour": None}]
    rows = data.frame().fill_nan(-1).rows()
    assert rows[:2] == [(1, "", "a", 0.5, 0.0, math.inf), (3, "", "a", -1.0, None, None)]
    assert rows[2:] == [(2, "r", "b", None, None, None), (3, "r", "b", 4.0, None, None)]
    assert data.frame().schema == {
        "step": pl.Int64,
        **dict.fromkeys(("run", "line"), pl.String),
        **dict.fromkeys(("value", "low", "high"), pl.Float64),
    }


def test_runs_of_one_group_become_their_mean_with_a_band() -> None:
    seeds = [{1: 1.0, 2: 4.0}, {1: 3.0, 2: math.nan}, {1: 7.0}]
    marks = [Mark(x=2, label="1", text="it fell")]
    runs = {f"seed {number}": figure(Series(name="loss", values=values)) for number, values in enumerate(seeds)}
    other = figure(Series(name="loss", values={1: 9.0}), marks=marks, notes=["a note"])
    laid = overlay({**runs, "other": other}, dict.fromkeys(runs, "all seeds"))
    mean, alone = laid.series
    assert (mean.name, mean.run, mean.values) == ("all seeds", "all seeds", {1: pytest.approx(11 / 3), 2: 4.0})
    assert (mean.band, mean.intervals) == (True, {1: (1.0, 7.0), 2: (4.0, 4.0)})
    assert (alone.name, alone.run, alone.values, alone.band) == ("other", "other", {1: 9.0}, False)
    assert laid.marks == [Mark(x=2, label="other 1", text="it fell", run="other")]
    assert [mark["colour"] for mark in laid.to_json()["marks"]] == [1]
    assert laid.notes == [
        "a note",
        "all seeds: mean of 3 runs, of 1 at some points; the band is from the lowest to the highest.",
    ]


def test_lines_of_several_runs_have_the_names_of_both_and_empty_runs_are_named() -> None:
    two = figure(Series(name="k1", values={1: 1.0}), Series(name="k3", values={1: 2.0}))
    laid = overlay({"a": two, "b": two, "c": figure()})
    assert [(each.name, each.run) for each in laid.series] == [
        *(("a: k1", "a"), ("a: k3", "a")),
        *(("b: k1", "b"), ("b: k3", "b")),
    ]
    assert laid.notes == ["c: no values."]
    assert looks(laid.series) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert looks(laid.series, ["c", "b", "a"]) == [(2, 0), (2, 1), (1, 0), (1, 1)]
    with pytest.raises(ValueError, match="wanted one figure of several runs"):
        overlay({"a": two, "b": figure(name="entropy")})
    assert short_labels(["s3://b/one/run", "/tmp/two/run", "/tmp/x"]) == ["one/run", "two/run", "tmp/x"]


def test_the_axes_hold_the_numbers() -> None:
    band = Series(name="mean", values={1: 2.0, 2: 3.0}, intervals={1: (1.0, 4.0), 2: (3.0, 3.0)}, band=True)
    bars = Series(name="bars", values={1: 1.0, 2: None}, intervals={1: (0.5, 1.5)})
    marked = figure(band, bars, marks=[Mark(x=2, label="1", text="it fell")], log_y=True)
    plot = draw([marked, figure(name="entropy"), figure(x_name="version")])
    first, second, third = plot.axes
    line, broken, mark = first.get_lines()
    assert (line.get_xydata().tolist(), mark.get_xdata()) == ([[1.0, 2.0], [2.0, 3.0]], [2, 2])  # type: ignore[union-attr]
    assert broken.get_ydata()[0] == 1.0
    assert math.isnan(broken.get_ydata()[1])
    area, stems = first.collections
    assert {tuple(place) for place in area.get_paths()[0].vertices.tolist()} == {(1, 1), (1, 4), (2, 3)}
    assert stems.get_segments()[0].tolist() == [[1, 0.5], [1, 1.5]]
    assert first.get_yscale() == "log"
    assert first.get_shared_x_axes().joined(first, second)
    assert not first.get_shared_x_axes().joined(first, third)
    assert [text.get_text() for text in second.texts] == ["no values in this run"]
    assert plot.get_supxlabel() == "1: it fell"
    # Labels of marks that are close would lie over each other.
    line = Series(name="loss", values={1: 1.0, 200: 2.0})
    marks = [Mark(x=x, label=str(x), text="it fell") for x in (2, 3, 9)]
    alone, laid = figure(line, marks=marks), overlay({"a": figure(line, marks=marks), "b": figure(line)})
    assert [[text.get_text() for text in axes.texts] for axes in draw([alone, laid]).axes] == [["2", "9"], []]


def test_hostile_names_are_shown_as_they_are() -> None:
    series = [Series(name=name, values={1: 1.0}) for name in (HOSTILE, "_", "x" * 1000)]
    plot = draw(
        [figure(*series, title=HOSTILE, unit=HOSTILE, notes=[HOSTILE], marks=[Mark(x=1, label="$", text=HOSTILE)])]
    )
    shown = HOSTILE.replace("\x1b", "\\x1b")
    (axes,) = plot.axes
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [shown, "_", "x" * 59 + "…"]
    texts = [*legend.get_texts(), *axes.texts, axes.title, axes._left_title, axes.yaxis.label, plot._supxlabel]  # type: ignore[attr-defined]
    assert not any(text.get_parse_math() or text.get_usetex() for text in texts if text.get_text())
    assert plot._repr_png_().startswith(b"\x89PNG")  # mathtext would raise


def test_each_run_has_a_colour_and_many_lines_have_the_legend_outside() -> None:
    several = overlay({label: figure(*_lines("a", "b")) for label in ("r", "s")})
    (axes,) = draw([several]).axes
    looks = [(to_hex(line.get_color()).upper(), line.get_linestyle()) for line in axes.get_lines()]
    assert looks == [(COLOURS[0], "-"), (COLOURS[0], "--"), (COLOURS[1], "-"), (COLOURS[1], "--")]
    plot = draw([figure(*_lines(*map(str, range(12))))])
    (axes,) = plot.axes
    plot._repr_png_()
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) == 12


def _lines(*names: str) -> list[Series]:
    return [Series(name=name, values={1: 1.0, 2: 2.0}) for name in names]


SIGHT = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""Linear RGB as such readers see it: Machado, Oliveira and Fernandes 2009, severity 1."""


def lab(colour: str, sight: str = "all colours") -> tuple[float, float, float]:
    """CIE L*a*b* of an sRGB colour."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in SIGHT[sight]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.0890
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize(("colours", "paper"), [(COLOURS, "#FFFFFF"), (DARK_COLOURS, "#14171B")])
def test_lines_stand_out_from_paper_and_from_each_other_for_every_reader(colours: list[str], paper: str) -> None:
    for sight in SIGHT:
        apart = [math.dist(lab(one, sight), lab(other, sight)) for one, other in combinations(colours, 2)]
        assert min(apart) > 15, sight  # Okabe and Ito's own eight are 16 apart
    luminances = [((lightness + 16) / 116) ** 3 for lightness, _, _ in map(lab, [paper, *colours])]
    contrasts = [(max(luminances[0], each) + 0.05) / (min(luminances[0], each) + 0.05) for each in luminances[1:]]
    assert min(contrasts) > 3  # WCAG 2.2, 1.4.11: graphics


@pytest.mark.slow
def test_one_line_plots_runs_by_name() -> None:
    run = ludic.open(GOLDEN)
    plot = run.plot("loss", "reward_mean/env_name", "evaluation")
    assert isinstance(plot, Plot)
    assert [axes.get_title(loc="left") for axes in plot.axes][:4] == [
        *("Loss", "Reward by environment"),
        *("mean_reward", "success_rate"),
    ]
    assert [text.get_text() for text in plot.axes[1].get_legend().get_texts()] == ["moar_cats"]  # type: ignore[union-attr]
    other = ludic.open(str(Path(GOLDEN).with_name("v1.7")))
    two = ludic.plot({"old": other, "new": GOLDEN}, "outcomes")
    names = [text.get_text() for text in two.axes[0].get_legend().get_texts()]  # type: ignore[union-attr]
    assert names[0] == "old: used"
    assert "new: used" in names
    seeds = run.plot("loss", also=[other])
    assert [text.get_text() for text in seeds.axes[0].get_legend().get_texts()] == ["v1.8", "v1.7"]  # type: ignore[union-attr]
    with pytest.raises(QueryError, match="name each root once"):
        ludic.plot({"a": run, "b": GOLDEN}, "loss")
    with pytest.raises(ConfigError, match="two runs have the label '1'"):
        ludic.plot({1: run, "1": other}, "loss")  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="there are reward_mean"):
        run.plot("kosten")
    assert len(run.plot(["loss", "entropy"]).axes) == 2  # type: ignore[arg-type]
    for wrong in ({"by": ["env_name", "level"]}, {"by": 3}):
        with pytest.raises(ConfigError, match="wanted the name of one column, such as 'env_name'"):
            run.plot("loss", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names of figures are texts, such as 'reward_mean'; got 3"):
        run.plot(3)  # type: ignore[arg-type]


def test_a_missing_matplotlib_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "ludic.app.operations.drawing")
    with pytest.raises(MissingPackageError, match=r"matplotlib is not installed; pip install 'ludic-rl\[plot\]'"):
        ludic.open(GOLDEN).plot("loss")


@pytest.mark.slow
def test_the_lines_of_the_guide_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[3] / "docs/reading.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^## Plots in one line\n.*?^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    for name in {*re.findall(r'"(runs/[^"]+)"', code)}:
        shutil.copytree(GOLDEN, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    made: list[Plot] = []
    names: dict[str, object] = {}
    for node in ast.parse(code).body:
        text = ast.unparse(node)
        if ".plot(" in text:
            made.append(eval(text, names))
        else:
            exec(text, names)
    assert [len(plot.axes) for plot in made] == [2, 1, 2, 2, 1]
    (axes,) = made[-1].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lr 1e-6", "lr 3e-6"]  # type: ignore[union-attr]


@pytest.mark.slow
def test_frames_have_the_numbers_of_steps() -> None:
    run = ludic.open(GOLDEN)
    assert run.frame().select("step", "loss", "entropy").rows() == [(1, -0.125, None)]
    by_index = run.frame("steps", by="group_index")
    assert by_index.columns[:3] == ["step", "group_index", "reward_mean"]
    assert by_index["reward_mean"].to_list() == [1.0, 0.0, 0.5, 2.0, 0.0, -1.0]
    assert run.frame("evaluation/mean_reward").rows() == [(3, "moar_cats", 3.0, None, None)]
    with pytest.raises(ConfigError, match="'step' is unknown; did you mean 'steps'"):
        run.frame("step")


def test_every_name_of_the_catalogue_is_one_word_of_its_own() -> None:
    assert len({kind.name for kind in FIGURES}) == len(FIGURES)
    assert all(kind.name.isidentifier() for kind in FIGURES)
