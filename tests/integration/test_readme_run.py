"""The README's own environment, with the README's own command and the demo's model, learns something."""

import re
import shlex
from pathlib import Path
from statistics import fmean
from textwrap import dedent

import forks

from ludic.app.demos.words import open_demo
from ludic.root.root import Root
from ludic.root.rows.tables import MetricsTail

README = Path(__file__).parents[2].joinpath("README.md").read_text()
NUM_STEPS = 15
"""Of the 40 that the README takes."""


def example_file() -> str:
    (text,) = re.findall(r"^    # cats\.py, used as.*?(?=^\S)", README, re.MULTILINE | re.DOTALL)
    return dedent(text)


def example_command() -> list[str]:
    (text,) = re.findall(r"^    ludic (run [^\n]*cats\.py:Cats.*?)\n\n", README, re.MULTILINE | re.DOTALL)
    return shlex.split(text.replace("\\\n", " "))


def test_the_readmes_example_learns(tmp_path: Path) -> None:
    open_demo(str(tmp_path / "runs" / "demo"))  # as `ludic demo` begins
    (tmp_path / "cats.py").write_text(example_file())
    run = forks.ludic(*example_command(), "--num-steps", str(NUM_STEPS), folder=tmp_path)
    assert run.returncode == 0, run.stderr

    (root,) = (path for path in (tmp_path / "runs").iterdir() if path.name != "demo")
    rows = sorted(
        (row for row in MetricsTail(Root.open(str(root))).poll() if row["kind"] == "train"), key=lambda row: row["step"]
    )
    rewards = [row["reward_mean"] for row in rows]
    assert len(rewards) == NUM_STEPS
    # Of 32 words at most: 0.1 at first, 1 to 2 after 15 steps (30 after 40).
    assert fmean(rewards[-3:]) > 4 * fmean(rewards[:3]) > 0
    # Without a terminal there is a line a step.
    steps = re.findall(
        r"ludic\.run: step (\d+) of 15  reward [\d.]+  loss .* tokens/s  cut at max_tokens [\d.]+%", run.stderr
    )
    assert [int(step) for step in steps] == list(range(1, NUM_STEPS + 1))
