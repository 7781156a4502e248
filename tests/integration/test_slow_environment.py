"""A run goes on while steps of its environment block the worker's event loop."""

import os
from pathlib import Path

from forks import Forked

import ludic
from ludic.app.demos.words import open_demo
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

OWN = """\
import time

from ludic.environments.environment import Example, Transition
from ludic.records.rollout import Message


class Slow:
    run_in = "loop"

    def example(self, index, split):
        return Example(example_id=str(index), messages=(Message(role="user", content="love cats"),))

    def reset(self, example):
        self.num_steps = 0
        return example.messages

    def step(self, action):
        time.sleep(0.01)
        self.num_steps += 1
        return Transition(observation="go on", reward=float(len(action)), terminated=self.num_steps == 4)
"""
NUM_STEPS = 10


def test_a_run_goes_on_while_steps_block_the_event_loop(tmp_path: Path) -> None:
    """By the commands that `ludic run` starts."""
    (tmp_path / "own.py").write_text(OWN)
    run = RunConfig(
        model=open_demo(str(tmp_path / "demo")).record.model,
        env=(f"{tmp_path}/own.py:Slow",),
        group_size=2,
        groups_per_batch=8,
        num_workers=1,
        max_tokens=4,
        accept_incomplete=True,
    )
    root = create_root(str(tmp_path / "run"), run)
    processes = [
        Forked(["ludic", *words, "--device", "cpu"], tmp_path / f"{words[0]}.log", {**os.environ, "COLUMNS": "120"})
        for words in (["train", root.url, "--num-steps", str(NUM_STEPS)], ["worker", root.url, "--slot", "0"])
    ]
    trainer, worker = processes
    try:
        assert trainer.wait(200) == 0, trainer.printed()
        assert worker.poll() is None, worker.printed()
        worker.terminate()
        assert worker.wait(60) == 0, worker.printed()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    steps = "select step, count(distinct group_id) from batches where used group by step order by step"
    with ludic.connect(root.url) as con:
        assert con.sql(steps).fetchall() == [(step, 8) for step in range(1, NUM_STEPS + 1)]
