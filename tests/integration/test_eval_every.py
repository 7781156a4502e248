"""`ludic run --eval-every K`: versions are evaluated beside training, whatever happens to the process that does it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import psutil
import pytest
from wandb_files import read_offline_run

import ludic
from ludic.demos.words import open_demo
from ludic.launch.here import last_step
from ludic.store import Root
from ludic.training.config import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STEPS, NUM_EXAMPLES = 8, 6
OPTIONS = {"num_examples": NUM_EXAMPLES, "n": 2, "examples_per_call": 2, "max_tokens": 8}
SETTINGS = ["--num-steps", str(NUM_STEPS), "--checkpoint-every", "4", "--learning-rate", "0.003"]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return open_demo(str(tmp_path / "run"))


def wait_until(condition: Callable[[], object], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def evaluator_of(pid: int) -> psutil.Process | None:
    for child in psutil.Process(pid).children():
        if child.status() != psutil.STATUS_ZOMBIE and child.cmdline()[2:5] == ["-m", "ludic", "eval"]:
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
    command = [sys.executable, "-m", "ludic", "run", root.url, *SETTINGS]
    command += ["--eval-every", "3", "--eval-options", json.dumps(OPTIONS), "--log-to", "wandb"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        wait_until(lambda: run.poll() is not None or root.folders("evals"))  # it has stored a first block
        evaluator = evaluator_of(run.pid)
        assert evaluator is not None, (tmp_path / "out").read_text()
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
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert again.returncode == 0, again.stderr
    assert sampled(root) == done
    assert ludic.open(root.url).compare(0, last).differences["num_examples"].to_list() == [NUM_EXAMPLES]


def test_an_evaluator_that_is_frozen_holds_up_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludic.launch.supervisor.KILL_AFTER_S", 0.0)
    seen: dict[str, object] = {}

    def freeze() -> None:
        wait_until(lambda: evaluator_of(os.getpid()))
        evaluator = evaluator_of(os.getpid())
        assert evaluator is not None
        evaluator.send_signal(signal.SIGSTOP)
        wait_until(lambda: last_step(root) == NUM_STEPS)
        seen.update(status=evaluator.status(), evals=root.folders("evals"))

    thread = threading.Thread(target=freeze)
    thread.start()
    config = TrainConfig.of(num_steps=NUM_STEPS, checkpoint_every=4, learning_rate=0.003, device="cpu")
    step = ludic.open(root.url).launch(config, eval_every=3, eval_options=OPTIONS, stop_within_s=2).step
    thread.join()
    assert step == NUM_STEPS
    assert seen == {"status": psutil.STATUS_STOPPED, "evals": []}
    # A new life evaluates what there is to evaluate: the first version and the last one.
    assert sampled(root) == [(0, 2 * NUM_EXAMPLES), (newest_version(root), 2 * NUM_EXAMPLES)]
