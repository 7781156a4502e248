"""An evaluation takes what is complete before it begins a further block, while scores block its event loop."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from simulated_engine import SimulatedEngine
from tiny_models import make_model

import ludic
from benchmarks.in_flight import Clock, NoWaits, without_threads
from ludic.environments import event_loops
from ludic.eval.config import EvalConfig
from ludic.eval.sampling import evaluate
from ludic.rollouts.scheduler import BegunGroup, Scheduler
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

OWN = """
import time

from ludic.environments.environment import Example
from ludic.records.rollout import Message


class Slow:
    run_in = "loop"

    def example(self, index, split):
        return Example(example_id=f"{split} {index}", messages=(Message(role="user", content="what is 2"),))

    def score(self, example, answer):
        time.sleep(0.05)
        return 1.0
"""


@pytest.mark.slow
def test_no_block_begins_while_complete_groups_stand_in_the_pump(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = RunConfig(
        model=make_model(tmp_path / "model", seed=1),
        env=(f"{tmp_path}/own.py:Slow",),
        max_tokens=8,
        accept_incomplete=True,
    )
    root, most_left = create_root(str(tmp_path / "run"), run), 0
    start = Scheduler.start

    def watched(scheduler: Scheduler, *args: Any) -> BegunGroup:
        nonlocal most_left
        most_left = max(most_left, len(scheduler._finished))
        return start(scheduler, *args)

    no_waits = NoWaits()

    def block(seconds: float) -> None:
        no_waits.now_s += seconds

    with ExitStack() as stack:
        clock = stack.enter_context(Clock(no_waits))
        stack.enter_context(without_threads())
        stack.enter_context(mock.patch.object(event_loops, "run", clock.run_until_complete))
        stack.enter_context(mock.patch.object(time, "sleep", block))
        stack.enter_context(mock.patch.object(Scheduler, "start", watched))
        config = EvalConfig(num_examples=96, examples_per_call=4)
        evaluate(root, {"": config}, lambda folder, version: SimulatedEngine(16), threading.Event())  # type: ignore[arg-type]
    assert most_left == 0
    assert ludic.open(root.url).sql("select count(*) from evals").item() == 96
