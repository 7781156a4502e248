"""`ludic run` with an environment that raises: it ends with file and line, and goes on once the file is corrected."""

import subprocess
import time
from pathlib import Path

import forks

import ludic
from ludic.app.demos.words import open_demo

OWN = """\
from ludic.environments.environment import Example
from ludic.records.rollout import Message


class Own:
    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="love cats"),))

    def score(self, example, answer):
        return reward(index_of(example), answer)


def index_of(example):
    return int(example.example_id.split("-")[1])


def reward(index, answer):
    return REWARD
"""
# The first example is what the checks before a start ask for.
FAILS, SOME_FAIL = (
    OWN.replace("REWARD", "[1.0][7 if index else 0]"),
    OWN.replace("REWARD", "[1.0][7 if index % 2 else 0]"),
)
WORKS = OWN.replace("REWARD", "float(len(answer))")
SETTINGS = ["--group-size", "4", "--groups-per-batch", "2", "--max-tokens", "8", "--accept-incomplete"]
SETTINGS += ["--learning-rate", "0.003", "--num-workers", "1"]


def run(root: Path, *args: str) -> subprocess.CompletedProcess:
    return forks.ludic("run", root, *args, folder=root.parent)


def test_a_run_of_which_everything_fails_ends_and_goes_on_after_the_fix(tmp_path: Path) -> None:
    model = open_demo(str(tmp_path / "demo")).record.model
    own, root = tmp_path / "own.py", tmp_path / "run"
    own.write_text(FAILS)
    began = time.monotonic()
    first = run(root, "--model", model, "--env", f"{own}:Own", *SETTINGS, "--num-steps", "2")
    errors = first.stderr.splitlines()
    assert first.returncode == 1
    assert time.monotonic() - began < 240  # half a minute on a machine with nothing else to do
    (said,) = (index for index, line in enumerate(errors) if line.startswith("ludic: "))
    assert errors[said].startswith("ludic: IndexError: list index out of range (own.py:18, in reward); by this, or ")
    assert f"groups of {root} failed, and step 1 has nothing to train on; correct it" in errors[said]
    assert "(trainer ended with 78 and is not started again; " in errors[said]
    assert [line.removeprefix("    ") for line in errors[said + 1 :]] == [
        "Traceback (most recent call last):",
        f'  File "{own}", line 10, in score',
        "    return reward(index_of(example), answer)",
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        f'  File "{own}", line 18, in reward',
        "    return [1.0][7 if index else 0]",
        "           ~~~~~^^^^^^^^^^^^^^^^^^^",
        "IndexError: list index out of range",
    ]
    assert "; started again" not in first.stderr
    assert "own.py:18, in reward" in (root / "logs" / "worker-0.log").read_text()

    rollout_id, error = (
        ludic.open(str(root)).sql("select rollout_id, error from rollouts where error is not null limit 1").row(0)
    )
    assert error == "IndexError: list index out of range (own.py:18, in reward)"
    shown = forks.ludic("view", root, rollout_id, folder=tmp_path)
    assert "line 18, in reward" in shown.stdout
    panel = forks.ludic("watch", root, "--once", folder=tmp_path)
    assert "own.py:18, in reward" in " ".join(panel.stdout.replace("\u2502", " ").split())

    own.write_text(WORKS)
    second = run(root, "--update-code")
    assert second.returncode == 0, second.stderr
    assert "trained to step 2" in second.stdout


def test_a_run_with_some_good_rollouts_goes_on(tmp_path: Path) -> None:
    model = open_demo(str(tmp_path / "demo")).record.model
    (tmp_path / "own.py").write_text(SOME_FAIL)  # one group of two
    settings = [*SETTINGS, "--num-steps", "3"]
    done = run(tmp_path / "run", "--model", model, "--env", f"{tmp_path}/own.py:Own", *settings)
    assert done.returncode == 0, done.stderr
    assert "trained to step 3" in done.stdout
