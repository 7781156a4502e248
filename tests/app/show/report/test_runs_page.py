"""The page of several runs: curves over each other, mean and band over seeds, what differs, and hostile texts."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from app.show.report.conftest import HOSTILE, SPELT
from app.show.report.test_page import text_of
from compared_runs import make_compared, train_on

import ludic
from ludic.app.operations.inspect_run import report
from ludic.app.show.figures import FigureData, Series
from ludic.app.show.report.plots import draw
from ludic.app.show.report.runs_page import make_runs_report
from ludic.errors import ConfigError
from ludic.root.root import Root

MakeRun = Callable[..., Root]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run of two steps with a group each, by its name, its mean rewards and its settings."""

    def make(name: str, *rewards: float, seed: int = 0, model: str = "m", **train: object) -> Root:
        steps = {step: [[reward - 0.5, reward + 0.5]] for step, reward in enumerate(rewards, 1)}
        return make_compared(str(tmp_path / name), steps, run={"seed": seed, "model": model}, **train)

    return make


def values_of(html: str, title: str) -> str:
    """The text of a plot: its legend, notes and numbers."""
    (found,) = [each for each in html.split("<figure>")[1:] if f"<figcaption><b>{title}</b>" in each]
    legend = found[found.index('<p class="legend">') : found.index("</figure>")]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", legend)).strip()


@pytest.mark.slow
def test_runs_that_differ_in_the_seed_are_one_line_and_others_have_their_own(make_run: MakeRun) -> None:
    roots = [
        make_run("a", 1.0, 2.0, learning_rate=1e-3),
        make_run("b", 2.0, 4.0, learning_rate=1e-3, seed=1),
        make_run("c", 9.0, 9.5, learning_rate=3e-3),
    ]
    html = make_runs_report(roots, None).html
    numbers = values_of(html, "Reward")
    group = "learning_rate=0.001 (2 runs)"
    assert numbers.startswith(f"{group} 1.5 → 3 c 9 → 9.5 {group}: mean of 2 runs; the band is from the lowest")
    assert numbers.endswith(f"step {group} from to c 1 1.5 1 2 9 2 3 2 4 9.5")
    assert html.count("<polygon") >= 1
    head = text_of(html)[: text_of(html).index("Reward")]
    assert "3 runs 3 stopped · they differ in learning_rate, seed · no run has clearly the highest reward" in head
    # Over the last steps up to step 2, c has the mean of 9 and 9.5.
    assert "up to step 2: c, 9.25 (no interval); b, 3 (no interval)" in head
    assert "a learning_rate=0.001 (2 runs) stopped 2 of " in text_of(html)
    with pytest.raises(ConfigError, match="setting 'learnin_rate'"):
        make_runs_report(roots, None, by="learnin_rate")
    by_seed = values_of(make_runs_report(roots, None, by="seed").html, "Reward")
    assert by_seed.startswith("seed=0, learning_rate=0.001 1 → 2 seed=1 2 → 4 seed=0, learning_rate=0.003 9 → 9.5 ")


@pytest.mark.slow
def test_a_run_that_was_resumed_is_one_curve(make_run: MakeRun) -> None:
    first, other = make_run("first", 1.0, 7.0), make_run("other", 2.0, 3.0, learning_rate=1e-3)
    train_on(first, {2: [[3.5, 4.5]], 3: [[4.5, 5.5]]}, parent=(1, 1))  # trains step 2 again
    report = ludic.Run(first).report(also=[other.url])
    assert values_of(report.html, "Reward").endswith("step first other 1 1 2 2 4 3 3 5 -")


def test_a_run_has_one_colour_in_all_figures_and_patterns_tell_its_lines_apart() -> None:
    def styles(*series: Series) -> list[str]:
        data = FigureData(name="lag", title="", unit="", x_name="step", series=series)
        return [line.style for line in draw(data, ["a", "b", "c"]).lines]

    def line(run: str, name: str) -> Series:
        return Series(name=f"{run}: {name}", run=run, values={1: 1.0, 2: 2.0})

    assert styles(line("a", "mean"), line("a", "highest"), line("c", "mean")) == ["c0 d0", "c0 d1", "c2 d0"]
    assert styles(line("b", "mean"), line("c", "mean")) == ["c1 d1", "c2 d2"]  # one line each: patterns follow the runs


def test_a_pointer_lists_the_highest_of_many_lines() -> None:
    series = [Series(name=f"{each}", values={1: float(each)}) for each in range(15)]
    (stop,) = draw(FigureData(name="reward_mean", title="", unit="", x_name="step", series=series)).stops
    assert [name for _, name, _, _ in stop.values] == [f"{each}" for each in range(14, 2, -1)]
    assert stop.num_more == 3


@pytest.mark.slow
def test_settings_of_a_report_of_one_run_are_refused_beside_several(make_run: MakeRun) -> None:
    one, other = make_run("one", 1.0), make_run("other", 1.0)
    with pytest.raises(ConfigError, match="versions is for a report of one run, and there are several"):
        ludic.Run(one).report(also=[other.url], versions="latest")
    with pytest.raises(ConfigError, match="of several runs --by is a setting"):
        ludic.Run(one).report(also=[other.url], by="difficulty")
    both = report(f"{Path(one.url).parent}/*").html
    assert "they differ in" not in both
    assert values_of(both, "Reward").startswith("all runs (2 runs) 1 → 1")
    with pytest.raises(ConfigError, match="is given twice"):
        ludic.Run(one).report(also=[one.url])
    with pytest.raises(ConfigError, match="nothing to compare"):
        make_runs_report([one], None)


@pytest.mark.slow
def test_hostile_runs_are_text_in_the_page_of_several(hostile: Root, make_run: MakeRun) -> None:
    other = make_run("<img src=x onerror=alert(1)>\x1b", 1.0, model=HOSTILE)
    html = make_runs_report([hostile, other], None).html
    assert SPELT in unescape(html)
    for tag in ("script", "img", "svg onload", "iframe"):
        assert f"<{tag}" not in html
    assert not set("\x00\x1b\u202e") & set(html)
    assert html.count("</style>") == 1
