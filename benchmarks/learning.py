"""Train the built-in environments from random weights, three seeds each: do they learn on a CPU, and by which command?

    python -m benchmarks.learning

Runs `ludic run`, as a user does, with the flags that docs/environments.md lists, one run after the other. Each run has
a model of its own seed, of the kind that `make demo` makes. `first` and `last` are mean rewards of the first and the
last tenth of the versions that were sampled.
"""

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import ludic
from benchmarks.measure import print_table
from ludic.app import OTHER_WORDS
from ludic.environments import WORDS
from ludic.models import make_tiny_model
from ludic.settings import run_script

COMMON = (
    "--accept-incomplete --group-size 16 --groups-per-batch 16 --num-workers 1 --batches-ahead 2 --learning-rate 4e-3 "
    "--schedule cosine --is-ratio-cap 2 --max-tokens-per-micro-batch 512 --device cpu"
)
"""Flags of all runs."""
_ONE_DIGIT = """--max-tokens 1 --num-steps 80 --env-options '{"NAME": {"max_digits": 1}}'"""
_TURNS = """--max-tokens 1 --num-steps 80 --advantage turn_returns --sql-params '{"discount": 0.5}'"""
FLAGS: Mapping[str, str] = {
    "moar_cats": "--max-tokens 32 --num-steps 40",
    "sequential_digits": "--max-tokens 2 --num-steps 100",
    "number_comparison": _ONE_DIGIT.replace("NAME", "number_comparison"),
    "addition": _ONE_DIGIT.replace("NAME", "addition"),
    "guess_number": "--max-tokens 1 --num-steps 60",
    "tic_tac_toe": _TURNS,
    "tic_tac_toe_self_play": _TURNS,
}
"""The environments that a model of random weights learns, and their own flags. The others need a warm start."""


def main(quick: bool = False, tasks: Sequence[str] = (), seeds: int = 3) -> None:
    """Print a table with a row for each environment.

    Args:
        quick: Make two steps of a single run, to check that the benchmark works.
        tasks: Names of environments; all if none is given.
        seeds: Number of runs of each environment.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in tasks or (["guess_number"] if quick else FLAGS):
            runs = [_learn(name, seed, Path(folder), quick) for seed in range(1 if quick else seeds)]
            firsts, lasts, seconds = zip(*runs, strict=True)
            of_seeds = ", ".join(f"{last:.2f}" for last in lasts)
            rows.append([name, f"{median(firsts):.2f}", of_seeds, f"{median(seconds):.0f}"])
    print_table(
        "learning: mean reward of the built-in environments, before and after training a tiny model",
        ["environment", "first, median", "last, each seed", "s, median"],
        rows,
    )


def _learn(name: str, seed: int, folder: Path, quick: bool) -> tuple[float, float, float]:
    """Return the mean rewards of the first and last tenth of versions, and the seconds of the whole command."""
    model, root = folder / f"model-{seed}", folder / f"{name}-{seed}"
    if not model.exists():
        make_tiny_model(str(model), [*WORDS, OTHER_WORDS], seed=seed)
    words = ["run", str(root), "--model", str(model), "--env", name, *shlex.split(f"{FLAGS[name]} {COMMON}")]
    began = time.perf_counter()
    # The last value of a flag counts.
    command = [sys.executable, "-m", "ludic", *words, *(["--num-steps", "2"] if quick else [])]
    subprocess.run(command, check=True, capture_output=True)
    elapsed_s = time.perf_counter() - began
    query = "select avg(episode_reward) as reward from rollouts group by policy_version order by policy_version"
    rewards = ludic.open(str(root)).sql(query)["reward"].to_list()
    tenth = max(1, len(rewards) // 10)
    return fmean(rewards[:tenth]), fmean(rewards[-tenth:]), elapsed_s


if __name__ == "__main__":
    run_script(main, description=__doc__)
