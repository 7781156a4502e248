"""A trainer and a worker that wait for each other: how long neither works, on a simulated clock.

Both are whole but for the engine and the gradient step, whose seconds pass on the clock, as pauses do; all other work
takes none of it. So what is left of a step is the time until the other side has noticed a file.
"""

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from benchmarks.in_flight import Clock, without_threads
from ludic.engines.engine import Completion, GenerationRequest
from ludic.records.rollout import WeightSpan
from ludic.rollouts.config import WorkerConfig
from ludic.rollouts.worker import opened_stream
from ludic.root.attempts import start_attempt
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root
from ludic.training.batches import online
from ludic.training.batches.online import OnlineSource
from ludic.training.config import TrainConfig
from ludic.training.publisher import Publisher

SAMPLED_S, TRAINED_S = 0.3, 0.14
NUM_STEPS = 6


class Engine:
    """Takes SAMPLED_S for a completion."""

    name, repeats_in_any_batch, max_length, max_batch, policy_version = "simulated 1", True, 10_000, 64, 0

    async def generate(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(SAMPLED_S)
        return Completion(
            tokens=np.ones(4, np.int32),
            columns={"response_logprobs": np.full(4, -1.0, np.float32)},
            finish_reason="stop",
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=4),),
        )

    def load_weights(self, folder: str, version: int) -> None:
        self.policy_version = version


@pytest.fixture
def root(tmp_path: Path, folder: str) -> Root:
    run = RunConfig(model=folder, env=("addition",), group_size=2, groups_per_batch=4, batches_ahead=0, max_tokens=8)
    return create_root(str(tmp_path / "run"), run)


@pytest.mark.slow
def test_on_a_local_disk_a_handoff_is_noticed_within_a_few_milliseconds(root: Root, folder: str) -> None:
    config, attempt = TrainConfig.of(num_steps=1, max_off_policy_steps=0).batch, start_attempt(root)

    def save(into: Path) -> None:
        for file in Path(folder).iterdir():
            (into / file.name).write_bytes(file.read_bytes())

    with ExitStack() as stack:
        clock = stack.enter_context(Clock())
        stack.enter_context(without_threads())
        stack.enter_context(mock.patch.object(online, "time", clock))
        publisher = Publisher(root, attempt, keep=2, max_off_policy_steps=0)
        stack.callback(publisher.close)
        source, stop = OnlineSource(root, config, clock), threading.Event()  # type: ignore[arg-type]
        source.resume(None, publisher)
        publisher.publish(save, step=0)
        stream = stack.enter_context(
            opened_stream(root, WorkerConfig(slot=0), lambda at, version: Engine(), stop)  # type: ignore[arg-type]
        )
        assert stream.wait_for_policy()
        sampling = clock.create_task(stream.run())
        handoffs_s = []
        for step in range(1, NUM_STEPS + 1):
            began_s = clock.time()
            plan = source.plan(step, attempt_id=attempt.attempt_id, trainer_version=step - 1)
            assert plan is not None
            assert set(plan.rows["policy_version"].to_pylist()) == {step - 1}
            handoffs_s.append(clock.time() - began_s - SAMPLED_S)
            clock.wait(TRAINED_S)
            publisher.publish(save, step=step)
        stop.set()
        clock.run_until_complete(sampling)
    # Each step has two hand-offs. A pause is 5 ms and 2% of the wait so far: 7.8 ms for the worker, 11 for the trainer.
    assert max(handoffs_s[1:]) <= 0.0078 + 0.011 + 0.001
    assert min(handoffs_s) >= 0
