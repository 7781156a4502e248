"""Time `ludic report` as a command over a run of 10,240 rollouts with two evaluations, beside an executed notebook.

    python -m benchmarks.report

A tiny model really samples, trains and is evaluated, so that every part of the page has figures. A command's time
includes the start of Python and all imports. The notebook is notebooks/rollouts.ipynb, which plots a part of the same
figures; it is executed in a kernel of its own, as `jupyter nbconvert --execute` does.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient

import ludic
from benchmarks.measure import print_table, take_turns, with_spread
from ludic.environments import WORDS
from ludic.models import make_tiny_model
from ludic.settings import run_script

_NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
STEPS = 8
"""Steps between two versions that are sampled from."""


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use a small run and one round, to check that the benchmark works.
    """
    num_versions, num_steps, num_rounds = (2, 1, 1) if quick else (20, STEPS, 5)
    with tempfile.TemporaryDirectory() as folder:
        run = _make_run(folder, num_versions, num_steps, num_examples=8 if quick else 64)
        seconds = take_turns(_contestants(run, Path(folder, "report.html")), num_rounds)
        (num_rollouts,) = run.sql("select count(*) from rollouts").row(0)
    rows = [[name, with_spread([1000 * each for each in times])] for name, times in seconds.items()]
    title = f"report: a run of {num_rollouts:,} rollouts and {num_steps * num_versions} steps, two evaluations"
    print_table(title, ["", "ms"], rows)


def _make_run(folder: str, num_versions: int, num_steps: int, num_examples: int) -> ludic.Run:
    """Return a run whose model has sampled and trained in turns, with its first and its last version evaluated."""
    make_tiny_model(f"{folder}/model", WORDS)
    run = ludic.create(f"{folder}/run", model=f"{folder}/model", env="moar_cats", max_tokens=32, accept_incomplete=True)
    for version in range(1, num_versions + 1):
        run.worker(num_groups=run.config.groups_per_batch * num_steps, device="cpu")
        run.train(num_steps=num_steps * version, learning_rate=4e-3, max_off_policy_steps=None, device="cpu")
    run.eval("0,latest", num_examples=num_examples, n=4, device="cpu")
    return run


def _contestants(run: ludic.Run, output: Path) -> dict[str, Callable[[], object]]:
    command = [sys.executable, "-m", "ludic", "report", run.url, "--output", str(output), "--overwrite"]
    return {
        "ludic report": lambda: subprocess.run(command, check=True, capture_output=True),
        "run.report() in a process that has run it before": run.report,
        "notebooks/rollouts.ipynb, executed": lambda: _execute_notebook(run.url),
    }


def _execute_notebook(url: str) -> None:
    notebook = nbformat.read(_NOTEBOOKS / "rollouts.ipynb", as_version=4)
    with mock.patch.dict(os.environ, LUDIC_ROOT=url):
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": _NOTEBOOKS}}).execute()


if __name__ == "__main__":
    run_script(main, description=__doc__)
