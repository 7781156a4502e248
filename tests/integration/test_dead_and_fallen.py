"""A run of two environments, one dead, one whose reward falls: panel, report and viewer say which and since when."""

import asyncio
import os
import re
from html import unescape
from pathlib import Path

import forks
import pytest

import ludic
from ludic.app.demos.words import open_demo

OWN = """\
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message


class Own:
    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="love cats"),))


class Dead(Own):
    def score(self, example, answer):
        return Score(reward=0.0, components={"never": 0.0})


class Falls(Own):
    def score(self, example, answer):
        works = int(example.example_id.split("-")[1]) < 30
        reward = (8.0 if works else 1.0) + 0.1 * (len(answer) % 4)
        return Score(reward=reward, components={"words": reward / 2})
"""
SETTINGS = ["--group-size", "4", "--groups-per-batch", "4", "--max-tokens", "8", "--accept-incomplete"]
SETTINGS += ["--num-steps", "28", "--num-workers", "1", "--batches-ahead", "1", "--learning-rate", "1e-5"]
DEAD, FALLS = "own.py:Dead", "own.py:Falls"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ludic.Run:
    folder = tmp_path_factory.mktemp("dead")
    model = open_demo(str(folder / "demo")).record.model
    (folder / "own.py").write_text(OWN)
    ludic_here(folder, "run", "run", "--model", model, "--env", DEAD, FALLS, *SETTINGS)
    return ludic.open(str(folder / "run"))


def ludic_here(folder: Path, *args: str) -> str:
    """Run a command in a folder, and return what it printed."""
    done = forks.ludic(*args, folder=folder, environment={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def began(run: ludic.Run) -> int:
    """The step that took the first weights with which examples from 30 on were sampled, from the rows themselves."""
    lows = run.sql("select min(policy_version) from rollouts where env_name = ? and episode_reward < 4", FALLS)
    steps = run.sql("select min(step) from metrics where kind = 'train' and policy_version >= ?", lows.item())
    return steps.item()


def check_lines(text: str, began: int) -> None:
    """Assert that a text says of both environments since which step what is wrong."""
    words = " ".join(text.split())
    assert re.search(rf"since step 1: rewards are equal within each of \d+ groups in {DEAD} \(about 0\)", words), words
    fell = re.search(rf"since step (\d+): the reward in {FALLS} fell from (\S+) \(step \d+\) to ([\d.]+);", words)
    assert fell is not None, words
    # A version is that of the moment at which rows are written; their rollouts may have begun some versions before.
    assert began - 1 <= int(fell[1]) <= began + 4
    assert float(fell[2]) > 7.5
    assert float(fell[3]) < 6


@pytest.mark.slow
def test_the_panel_says_which_and_since_when_also_after_the_end(run: ludic.Run, began: int) -> None:
    text = ludic_here(Path(run.url).parent, "watch", "run", "--once")
    check_lines(text.replace("│", " "), began)
    assert re.search(rf"{DEAD} +0  ▁+ ", text)
    assert re.search(rf"{FALLS} +1\.\d+  [▇█].*[▁▂] ", text)
    for name in (DEAD, FALLS):  # the table of environments
        assert re.search(rf"{name} +[\d,]+ +\S+ +\S+ +0\.0%", text)


@pytest.mark.slow
def test_the_report_says_which_and_since_when_and_marks_the_step(run: ludic.Run, began: int) -> None:
    html = run.report().html
    warnings = html[html.index('id="warnings"') : html.index('<h2 id="training">')]
    check_lines(re.sub("<[^>]*>", " ", unescape(warnings)), began)
    plot = html[html.index("<b>Reward by environment</b>") :]
    plot = plot[: plot.index("</figure>")]
    fall = re.search(r"since step (\d+): the reward", html)
    assert fall is not None
    (title,) = re.findall(r'<g class="mark">.*?<title>(since step \d+: the reward[^<]*)', plot)
    assert FALLS in title
    assert f"Components of the reward in {FALLS}" in html
    assert f"0 at all steps: Truncated, Failed, Components of the reward in {DEAD}" in html


@pytest.mark.slow
def test_the_viewer_says_which_and_since_when(run: ludic.Run, began: int) -> None:
    pytest.importorskip("textual", reason="textual is not installed (extra view)")
    from textual.widgets import Static

    from ludic.app.show.terminal.app import ViewApp

    async def first_screen() -> tuple[str, str]:
        app = ViewApp(run.root)
        async with app.run_test(size=(150, 40)) as pilot:
            await pilot.pause()
            await app.workers.wait_for_complete()
            await pilot.pause()
            strips = app.screen._compositor.render_strips()
            return "\n".join(strip.text for strip in strips), str(app.screen.query_one("#diagnostics", Static).content)

    screen, diagnostics = asyncio.run(first_screen())
    check_lines(diagnostics, began)
    for name in (DEAD, FALLS):  # a line on the screen, of which a narrow terminal may cut the advice
        assert re.search(rf"warning: since step \d+: .* in {name}", screen)
