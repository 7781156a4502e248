"""Time `ludic compare` as a command over three runs of 10,048 rollouts, alone and with the report of the runs.

    python -m benchmarks.compare

The runs have 157 steps with ledgers and metrics, of rollouts by benchmarks.stores; they differ in the learning rate. A
command's time includes the start of Python and all imports.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import ludic
from benchmarks.measure import print_table, take_turns, with_spread
from benchmarks.stores import GROUPS_A_FILE, make_store
from ludic.base import CACHE_VARIABLE
from ludic.root import Root, start_attempt
from ludic.root.rows import MetricsLog, RolloutReader, step_numbers, write_ledger
from ludic.root.sql import BatchRules, Planner
from ludic.settings import run_script
from ludic.training import TrainConfig

_RATES = (1e-6, 3e-6, 1e-5)


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use small runs and one round, to check that the benchmark works.
    """
    num_files, num_rounds = (4, 1) if quick else (157, 5)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = f"{folder}/cache"
        runs = [_make_run(f"{folder}/runs/{rate}", rate, num_files) for rate in _RATES]
        seconds = take_turns(_contestants(runs, Path(folder, "page.html")), num_rounds)
        ((num_rollouts,),) = ludic.connect(runs[0]).sql("select count(*) from rollouts").fetchall()
    rows = [[name, with_spread([1000 * each for each in times])] for name, times in seconds.items()]
    print_table(f"compare: three runs of {num_rollouts:,} rollouts and {num_files} steps", ["", "ms"], rows)


def _make_run(url: str, rate: float, num_files: int) -> Root:
    """Return a run that has trained once on each file of rollouts, by the ledger and the metrics."""
    root = make_store(url, num_files, num_versions=1, mean_length=20, base_groups=num_files * GROUPS_A_FILE)
    planner = Planner(BatchRules(groups_per_batch=GROUPS_A_FILE))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    attempt = start_attempt(root, config=TrainConfig.of(learning_rate=rate).flat())
    with closing(MetricsLog(root, "train", f"{attempt.attempt_id}")) as log:
        for step in range(1, num_files + 1):
            plan = planner.plan(step=step, attempt_id=attempt.attempt_id, trainer_version=0)
            if plan is None:  # the last groups do not fill a batch, since some were dropped
                break
            write_ledger(root, attempt, step, plan)
            figures = {"loss": 1 / step, "entropy": 2.0, "grad_norm": 1.0, "step_s": 3.0, "num_tokens": 2_000}
            log.write(attempt_id=attempt.attempt_id, step=step, policy_version=step, **step_numbers(plan), **figures)
    return root


def _contestants(runs: list[Root], output: Path) -> dict[str, Callable[[], object]]:
    command = [sys.executable, "-m", "ludic", "compare", *(root.url for root in runs)]
    page = ["--output", str(output), "--overwrite"]
    return {
        "ludic compare A B C": lambda: subprocess.run(command, check=True, capture_output=True),
        "ludic compare A B C --output page.html": lambda: subprocess.run(
            [*command, *page], check=True, capture_output=True
        ),
        "ludic.compare([A, B, C]) in a process that has run it before": lambda: ludic.compare(runs),
    }


if __name__ == "__main__":
    run_script(main, description=__doc__)
