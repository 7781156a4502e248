"""Measure rollouts a second of `ludic run` with environments whose steps wait, in methods that block and in coroutines.

    python -m benchmarks.waiting_environments

Each run is a `ludic run` of a tiny model with the transformers engine on the CPU, one worker, and 64 episodes of four
steps in flight. A step sleeps for 0 to 500 ms: `def step` by time.sleep, in a class without run_in, or `async def step`
by asyncio.sleep. Both take turns, and `blocking of awaited` is the median over rounds of the ratio within a round.

Rates leave out the start and the end of a run: they count the episodes that ended between the first quarter of all
ends and the last tenth, by the ends that the worker stores (the table `requests`).
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import ludic
from benchmarks.measure import median_ratio, print_table
from ludic.environments import WORDS
from ludic.models import make_tiny_model
from ludic.settings import run_script

NUM_TURNS, IN_FLIGHT = 4, 64
STEPS: Mapping[int, int] = {0: 24, 5: 24, 50: 24, 500: 10}
"""Training steps of 64 rollouts of a run, by the milliseconds of a step of its environment: about 20 s."""
FLAGS = (
    f"--num-workers 1 --in-flight {IN_FLIGHT} --max-batch {IN_FLIGHT} --group-size 8 --groups-per-batch 8 "
    "--max-tokens 4 --accept-incomplete --device cpu"
)
ENVIRONMENTS = f"""\
import asyncio
import time

from ludic.environments import Example, Transition
from ludic.records import Message


class Blocking:
    def __init__(self, wait_s):
        self.wait_s, self.num_steps = wait_s, 0

    def example(self, index, split):
        return Example(example_id=f"{{split}}-{{index}}", messages=(Message(role="user", content="cats"),))

    def reset(self, example):
        return example.messages

    def step(self, action):
        time.sleep(self.wait_s)
        return self.moved(action)

    def moved(self, action):
        self.num_steps += 1
        is_over = self.num_steps == {NUM_TURNS}
        return Transition(observation=None if is_over else "cats", reward=float("cats" in action), terminated=is_over)


class Awaited(Blocking):
    async def step(self, action):
        await asyncio.sleep(self.wait_s)
        return self.moved(action)
"""
ENDS = "select ended_at, outcome from request_episodes where ended_at is not null order by ended_at"
"""Ends of all episodes, with the times of the worker."""


def main(quick: bool = False, rounds: int = 3) -> None:
    """Print a table with a row for each time of a step.

    Args:
        quick: Make few steps and one round, to check that the benchmark works.
        rounds: Number of runs of each cell.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(f"{folder}/model", WORDS)
        Path(folder, "waits.py").write_text(ENVIRONMENTS)
        for wait_ms, num_steps in {5: 3}.items() if quick else STEPS.items():
            rates: dict[str, list[float]] = {"Blocking": [], "Awaited": []}
            for number in range(1 if quick else rounds):
                for name, found in rates.items():
                    root = f"{folder}/{name}-{wait_ms}-{number}"
                    found.append(_rate(folder, root, name, wait_ms, num_steps))
            cells = (f"{median(found):.1f} ({min(found):.1f} to {max(found):.1f})" for found in rates.values())
            rows.append([f"{wait_ms} ms", *cells, f"{median_ratio(*rates.values()):.2f}x"])
    print_table(
        f"waiting_environments: rollouts/s of episodes of {NUM_TURNS} steps, {IN_FLIGHT} in flight",
        ["a step waits", "blocking", "awaited", "blocking of awaited"],
        rows,
    )


def _rate(folder: str, root: str, name: str, wait_ms: int, num_steps: int) -> float:
    """Return the rollouts a second of a run between its start and its end."""
    environment = f"{folder}/waits.py:{name}"
    options = json.dumps({environment: {"wait_s": wait_ms / 1000}})
    words = ["run", root, "--model", f"{folder}/model", "--env", environment, "--env-options", options]
    command = [sys.executable, "-m", "ludic", *words, *FLAGS.split(), "--num-steps", str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    ends = ludic.open(root).sql(ENDS)
    assert set(ends["outcome"]) == {"complete"}, "an episode failed"
    times = ends["ended_at"].to_list()
    first, last = len(times) // 4, len(times) * 9 // 10
    return float((last - first) / (times[last] - times[first]).total_seconds())


if __name__ == "__main__":
    run_script(main, description=__doc__)
