"""Measure the share of a trainer's time spent waiting for data when all rollouts exist: the cost of plans and reads.

    python -m benchmarks.wait

A worker first fills a root. Then the real trainer runs alone, with one rank on the CPU. Plans and reads run in threads
during a step, so their time, measured separately by repeating them, should not appear as waiting.
"""

import tempfile
import threading
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import ludic
from benchmarks.measure import print_table
from ludic.environments import WORDS
from ludic.models import make_tiny_model
from ludic.root import Root
from ludic.root.rows import RolloutReader
from ludic.root.sql import BatchRules, Planner, connect
from ludic.run import run_of
from ludic.settings import run_script
from ludic.training import TrainConfig, train
from ludic.training.batches import pack, read_sequences

TIMES = """
select
    count(*) as num_steps,
    median(step_s) as step_s,
    median(wait_s) as wait_s,
    median(publish_s) as publish_s,
    sum(wait_s) / sum(step_s + wait_s + publish_s) as waiting
from metrics
where kind = 'train' and step > 1 -- the first has nothing to overlap with
"""


def main(quick: bool = False) -> None:
    """Print a table with a row for each size of model.

    Args:
        quick: Use one small model and three steps, to check that the benchmark works.
    """
    sizes, num_steps = ((64,), 3) if quick else ((64, 256), 25)
    rows = []
    for size in sizes:
        times = _measure(size, num_steps)
        names = ("step_s", "plan_s", "read_s", "publish_s", "wait_s")
        rows.append([str(size), *(f"{times[name] * 1e3:.1f} ms" for name in names), f"{times['waiting']:.1%}"])
    columns = [
        "width",
        "step",
        "plan (in a thread)",
        "read (in a thread)",
        "publish",
        "wait",
        "of the time spent waiting",
    ]
    print_table("A trainer whose rollouts are all there, 64 rollouts a step (medians)", columns, rows)


def _measure(hidden_size: int, num_steps: int) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root = _fill(folder, hidden_size, num_steps)
        config = TrainConfig.of(num_steps=num_steps, learning_rate=1e-4, max_off_policy_steps=None, device="cpu")
        train(root, config, threading.Event())
        (times,) = connect(root).sql(TIMES).to_arrow_table().to_pylist()
        assert times["num_steps"] == num_steps - 1
        return times | _plan_and_read_again(root, num_steps)


def _fill(folder: str, hidden_size: int, num_steps: int) -> Root:
    make_tiny_model(f"{folder}/model", WORDS, hidden_size=hidden_size)
    run = ludic.create(f"{folder}/run", model=f"{folder}/model", env="moar_cats", max_tokens=32, accept_incomplete=True)
    run.worker(num_steps * run.config.groups_per_batch, device="cpu")
    return run.root


def _plan_and_read_again(root: Root, num_steps: int) -> dict[str, float]:
    """Return the median seconds of the calls that the trainer's threads made."""
    planner = Planner(BatchRules(groups_per_batch=run_of(root).groups_per_batch))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    seconds: dict[str, list[float]] = {"plan_s": [], "read_s": []}
    for step in range(1, num_steps + 1):
        start = time.perf_counter()
        plan = planner.plan(step=step, attempt_id=1, trainer_version=step)
        planned = time.perf_counter()
        assert plan is not None
        pack(read_sequences(root, plan.filter(plan["used"])))
        seconds["plan_s"].append(planned - start)
        seconds["read_s"].append(time.perf_counter() - planned)
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    run_script(main, description=__doc__)
