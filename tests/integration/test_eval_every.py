"""`ludic run --eval-every K`: versions are evaluated beside training, whatever happens to the process that does it."""

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import forks
import psutil
import pytest
from forks import Forked, words_of
from tiny_runs import create_root
from wandb_files import read_offline_run

import ludic
from ludic.app.demos.words import open_demo
from ludic.app.launch.train import last_step
from ludic.root.root import Root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STEPS, NUM_EXAMPLES = 5, 6
OPTIONS = {"num_examples": NUM_EXAMPLES, "n": 2, "examples_per_call": 2, "max_tokens": 8}
SETTINGS = ["--num-steps", str(NUM_STEPS), "--checkpoint-every", "4", "--learning-rate", "0.003"]
SETTINGS += ["--eval-every", "3", "--eval-options", json.dumps(OPTIONS)]
# `ludic run` that kills what does not stop at once.
IMPATIENT = """
import sys

import ludic.app.launch.supervisor
from ludic.app.cli.main import main

ludic.app.launch.supervisor.KILL_AFTER_S = 0.0
main(sys.argv[1:])
"""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    sizes = {"groups_per_batch": 4, "num_workers": 1, "max_tokens": 16, "accept_incomplete": True}
    return create_root(str(tmp_path / "run"), open_demo(str(tmp_path / "demo")).record.model, **sizes)


def wait_until(condition: Callable[[], object], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def evaluator_of(pid: int) -> psutil.Process | None:
    for child in psutil.Process(pid).children(recursive=True):
        if child.status() != psutil.STATUS_ZOMBIE and words_of(child)[2:5] == ["-m", "ludic", "eval"]:
            return child
    return None


def sampled(root: Root) -> list[tuple[int, int]]:
    """Versions with the number of samples; no sample may be stored twice."""
    rows = ludic.open(root.url).sql("""
        select policy_version, count(*) as samples, count(distinct request_index) as different
        from evals group by all order by all
    """)
    assert rows["samples"].equals(rows["different"])
    return rows.select("policy_version", "samples").rows()


def newest_version(root: Root) -> int:
    return int(ludic.open(root.url).sql("select max(version) as newest from policies")["newest"].item())


def test_an_evaluator_that_is_killed_is_started_again_and_finishes_after_training(root: Root, tmp_path: Path) -> None:
    command = ["ludic", "run", root.url, *SETTINGS, "--log-to", "wandb"]
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    run = Forked(command, tmp_path / "out", environment)
    try:
        wait_until(lambda: run.poll() is not None or root.folders("evals"))  # it has stored a first block
        evaluator = evaluator_of(run.pid)
        assert evaluator is not None, (tmp_path / "out").read_text()
        assert evaluator.ppid() != run.pid, "not forked, although it may be"
        evaluator.kill()
        assert run.wait(200) == 0, (tmp_path / "out").read_text()
    finally:
        run.kill()
    said = (tmp_path / "out").read_text()
    assert "evaluator ended with -9; started again" in said
    assert f"trained to step {NUM_STEPS} of {NUM_STEPS}" in said
    assert last_step(root) == NUM_STEPS
    done, last = sampled(root), newest_version(root)
    assert done[0] == (0, 2 * NUM_EXAMPLES)
    assert done[-1] == (last, 2 * NUM_EXAMPLES)
    assert all(version % 3 == 0 for version, _ in done[:-1])
    assert ludic.open(root.url).verify().findings == []

    # W&B has it all as one run: from the trainer, and from `ludic run`, which waited for the last evaluation.
    tracked = [read_offline_run(folder) for folder in sorted(tmp_path.glob("wandb/offline-run-*"))]
    assert {each.facts["run_id"] for each in tracked} == {root.run_id}
    counts = dict(chain.from_iterable(each.curve("eval/moar_cats/num_samples") for each in tracked))
    assert (min(counts), max(counts)) == (0, NUM_STEPS)
    assert counts[0] == counts[NUM_STEPS] == 2 * NUM_EXAMPLES
    steps = [step for each in tracked for step, _ in each.curve("env/moar_cats/reward_mean")]
    assert steps == list(range(1, NUM_STEPS + 1))

    # All is there: the same command has nothing to do, and the first and the last version can be compared.
    again = forks.ludic(*command[1:], folder=tmp_path, environment=environment)
    assert again.returncode == 0, again.stderr
    assert sampled(root) == done
    assert ludic.open(root.url).compare(0, last).differences["num_examples"].to_list() == [NUM_EXAMPLES]


def test_an_evaluator_that_is_frozen_holds_up_nothing(root: Root, tmp_path: Path) -> None:
    script = tmp_path / "impatient.py"
    script.write_text(IMPATIENT)
    run = Forked([script, "run", root.url, *SETTINGS, "--stop-within-s", "2"], tmp_path / "out")
    try:
        wait_until(lambda: run.poll() is not None or evaluator_of(run.pid))
        evaluator = evaluator_of(run.pid)
        assert evaluator is not None, run.printed()
        evaluator.send_signal(signal.SIGSTOP)
        wait_until(lambda: run.poll() is not None or last_step(root) == NUM_STEPS)
        assert (evaluator.status(), root.folders("evals")) == (psutil.STATUS_STOPPED, []), run.printed()
        assert run.wait(200) == 0, run.printed()
    finally:
        run.kill()
    assert last_step(root) == NUM_STEPS
    # A new life evaluates what there is to evaluate: the first version and the last one.
    assert sampled(root) == [(0, 2 * NUM_EXAMPLES), (newest_version(root), 2 * NUM_EXAMPLES)]
