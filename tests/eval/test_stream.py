"""An evaluation as a stream: the engine stays full over blocks, and processes leave each other's blocks alone."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ludic
from ludic.engines.engine import Completion, GenerationRequest
from ludic.eval import sampling
from ludic.records.rollout import RolloutBatch, WeightSpan
from ludic.root.json_records import Evaluator, encode_record
from ludic.root.rows.evaluations import BlockClaims
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

pytestmark = pytest.mark.slow

ENVIRONMENT = """
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message


class Same:
    def __init__(self, reward=0.5):
        self.reward = reward

    def example(self, index, split):
        return Example(example_id=str(index), messages=(Message(role="user", content="what is 2"),))

    def score(self, example, answer):
        return Score(reward=self.reward)
"""
LONG = 100


class TickingEngine:
    """Adds a token to each running sequence at a tick; the first answer has LONG tokens, all others have one.

    A tick waits until the batch is full or `total` requests have come, so that a slow machine changes nothing. Once it
    has waited for 5 s, no further tick waits: the caller itself waits for the longest answer.
    """

    name, repeats_in_any_batch, max_length, policy_version = "ticking 1", True, 10_000, 0

    def __init__(self, total: int, max_batch: int = 8) -> None:
        self.total, self.max_batch = total, max_batch
        self.num_started = 0
        self.ticks: list[tuple[int, int]] = []
        """Sequences that ran at each tick, and requests that had come."""
        self._left: dict[asyncio.Future[None], int] = {}
        self._waits = True

    async def generate(self, request: GenerationRequest) -> Completion:
        length = 1 if self.num_started else LONG
        self.num_started += 1
        ends = asyncio.get_running_loop().create_future()
        if not self._left:
            self._ticking = asyncio.create_task(self._tick())
        self._left[ends] = length
        await ends
        return Completion(
            tokens=np.full(length, 1, np.int32),
            columns={"response_logprobs": np.full(length, -1.0, np.float32)},
            finish_reason="stop",
            weight_versions=(WeightSpan(version=0, start=0, end=length),),
        )

    async def _tick(self) -> None:
        await asyncio.sleep(0)
        while self._left:
            until = time.monotonic() + 5
            while self._waits and len(self._left) < self.max_batch and self.num_started < self.total:
                self._waits = time.monotonic() < until
                await asyncio.sleep(0.001)
            self.ticks.append((len(self._left), self.num_started))
            for ends in list(self._left):
                self._left[ends] -= 1
                if self._left[ends] == 0:
                    del self._left[ends]
                    ends.set_result(None)
            await asyncio.sleep(0.001)


@pytest.fixture
def run(tmp_path: Path, folder: str) -> ludic.Run:
    (tmp_path / "same.py").write_text(ENVIRONMENT)
    config = RunConfig(model=folder, env=(f"{tmp_path}/same.py:Same",), group_size=1, max_tokens=LONG)
    return ludic.Run(create_root(str(tmp_path / "run"), config))


def evaluate(run: ludic.Run, engine: TickingEngine, **settings: Any) -> Any:
    given: dict[str, Any] = {"examples_per_call": 8, "report": lambda batch: None, "stop": threading.Event()}
    return run.eval(0, engine=lambda folder, version: engine, **given | settings)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def counts(run: ludic.Run) -> tuple[int, int]:
    """Rows and different samples that are stored."""
    found = run.sql("select count(*) as rows, count(distinct request_index) as samples from evals")
    return found.rows()[0]


@pytest.mark.parametrize("in_flight", [None, 8])
def test_one_long_answer_leaves_no_slot_of_the_engine_empty(run: ludic.Run, in_flight: int | None) -> None:
    engine = TickingEngine(total=76)
    evaluate(run, engine, num_examples=38, n=2, examples_per_call=4, in_flight=in_flight)
    assert counts(run) == (76, 76)
    before_the_last = [num_running for num_running, num_started in engine.ticks if num_started < 76]
    # 8 at first, then 7 new ones a tick: after 9 ticks, 8 + 9 * 7 = 71 have come; at the 11th, the last one.
    assert before_the_last == [8] * 10
    assert len(engine.ticks) == LONG
    (longest,) = run.sql("select max(response_length) as longest from evals")["longest"]
    assert longest == LONG


def test_no_more_episodes_run_than_in_flight_says(run: ludic.Run) -> None:
    engine = TickingEngine(total=0)
    evaluate(run, engine, num_examples=24, in_flight=3)
    assert max(num_running for num_running, _ in engine.ticks) == 3
    assert counts(run) == (24, 24)


def test_a_suite_is_one_stream_in_which_each_entry_has_its_own_environment(run: ludic.Run, tmp_path: Path) -> None:
    entries = [
        f'[[entries]]\nname = "{name}"\nenv = "{tmp_path}/same.py:Same"\noptions = {{ reward = {reward} }}\n'
        for name, reward in (("low", 0.25), ("high", 0.75))
    ]
    (tmp_path / "suite.toml").write_text("".join(["num_examples = 24\n", *entries]))
    engine = TickingEngine(total=48)
    found = evaluate(run, engine, suite=str(tmp_path / "suite.toml"))
    assert all(num_running == 8 for num_running, num_started in engine.ticks if num_started < 48)
    means = found.measures.filter(measure="mean_reward").select("entry", "estimate").rows()
    assert dict(means) == {"low": 0.25, "high": 0.75}


def test_two_processes_at_once_sample_nothing_twice(run: ludic.Run) -> None:
    engines = [TickingEngine(total=0, max_batch=2) for _ in range(2)]
    threads = [
        threading.Thread(target=evaluate, args=(run, engine), kwargs={"num_examples": 24, "examples_per_call": 2})
        for engine in engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(run) == (24, 24)
    assert sum(engine.num_started for engine in engines) == 24
    assert run.root.list("evaluators") == []


def test_a_block_that_another_process_samples_is_left_to_it_until_it_gives_up(run: ludic.Run) -> None:
    engine, stored = TickingEngine(total=0), list[RolloutBatch]()
    evaluate(run, engine, num_examples=16)
    blocks = run.root.list("evals")
    for name in blocks:  # so that both are missing again
        run.root.delete(name)
    with BlockClaims(run.root) as other:
        assert other.take(blocks[0])
        options = {"num_examples": 16, "report": stored.append}
        thread = threading.Thread(target=evaluate, args=(run, engine), kwargs=options)
        thread.start()
        wait_until(lambda: len(stored) == 1)
        assert blocks[0] not in run.root.list("evals")
        assert thread.is_alive()
    thread.join()
    assert counts(run) == (16, 16)
    assert blocks[0] in run.root.list("evals")


def test_the_blocks_of_a_process_that_is_silent_are_sampled_when_its_lease_is_over(
    run: ludic.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "BlockClaims", partial(BlockClaims, lease_s=0.5))
    engine = TickingEngine(total=0)
    evaluate(run, engine, num_examples=8)
    (block,) = run.root.list("evals")
    run.root.delete(block)
    silent = Evaluator(owner="elsewhere-1", process=None, blocks=[block])
    run.root.put("evaluators/01929292-0000-7000-8000-000000000001.json", encode_record(silent))
    evaluate(run, engine, num_examples=8)
    assert run.root.list("evals") == [block]
    assert run.root.list("evaluators") == []
