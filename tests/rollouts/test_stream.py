"""A worker's stream: weights change under what is sampled, as the settings say, and stopping finishes or gives up."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import committed_rows, publish

import ludic
from ludic.engines.engine import Completion, GenerationRequest
from ludic.errors import EngineError, HalfLoadedError, ModelError
from ludic.records.rollout import GROUP_CLOSED, WeightSpan
from ludic.rollouts.config import WorkerConfig
from ludic.rollouts.worker import run_worker
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

TOKENS = 8
ENVIRONMENT = """
from ludic.environments.environment import Example, Transition
from ludic.records.rollout import Message


class Twice:
    def example(self, index, split):
        return Example(example_id=str(index), messages=(Message(role="user", content="what is 2"),))

    def reset(self, example):
        self.num_steps = 0
        return example.messages

    def step(self, action):
        self.num_steps += 1
        return Transition(observation="what is 2", reward=1.0, terminated=self.num_steps == 2)
"""


class SlowEngine:
    """Takes 5 to 15 ms a token, the same for all tokens of a completion, so that completions end at different times."""

    name, repeats_in_any_batch, max_length, max_batch = "slow 1", True, 10_000, 8

    def __init__(self, version: int) -> None:
        self.policy_version = version
        self.num_running = self.most_running = self.num_done = 0
        self.is_dead = False
        self.fails_to_load: int | None = None
        self.half_loaded: str | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        versions: list[int] = []
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        token_s = random.Random(request.seed).uniform(0.005, 0.015)
        try:
            for _ in range(TOKENS):
                if self.is_dead:
                    raise EngineError("the engine is gone")
                if self.half_loaded:
                    raise HalfLoadedError(self.half_loaded)
                versions.append(self.policy_version)
                await asyncio.sleep(token_s)
        finally:
            self.num_running -= 1
        self.num_done += 1
        starts = [index for index in range(TOKENS) if index == 0 or versions[index] != versions[index - 1]]
        ends = [*starts[1:], TOKENS]
        return Completion(
            tokens=np.full(TOKENS, 1, np.int32),
            columns={"response_logprobs": np.full(TOKENS, -1.0, np.float32)},
            finish_reason="length",
            weight_versions=tuple(
                WeightSpan(version=versions[start], start=start, end=end)
                for start, end in zip(starts, ends, strict=True)
            ),
        )

    def load_weights(self, folder: str, version: int) -> None:
        if version == self.fails_to_load:
            self.half_loaded = folder
            raise ModelError(f"{folder}: reading its weights failed half-way")
        self.half_loaded, self.policy_version = None, version


def create(tmp_path: Path, folder: str, **settings: Any) -> Root:
    (tmp_path / "twice.py").write_text(ENVIRONMENT)
    env = (f"{tmp_path}/twice.py:Twice",)
    run = RunConfig(model=folder, env=env, max_tokens=TOKENS, accept_incomplete=True, **settings)
    root = create_root(str(tmp_path / "run"), run)
    publish(root, folder, budget=10**6)
    return root


@pytest.fixture
def root(tmp_path: Path, folder: str) -> Root:
    return create(tmp_path, folder, group_size=2)


@contextmanager
def working(root: Root, **settings: Any) -> Iterator[tuple[SlowEngine, Callable[[], int]]]:
    """Give the engine, and a function that stops the worker and returns the number of groups that it committed."""
    stop, engine = threading.Event(), SlowEngine(0)
    config = WorkerConfig(**{"slot": 0, "in_flight": 8} | settings)
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(run_worker, root, config, lambda folder, version: engine, stop)

        def end() -> int:
            stop.set()
            return worker.result()

        try:
            yield engine, end
        finally:
            stop.set()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def versions(root: Root) -> list[list[int]]:
    """The versions that sampled each row, in order."""
    rows = committed_rows(root, "weight_versions", "policy_version")
    return [[span["version"] for span in row["weight_versions"] or ()] or [row["policy_version"]] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("swap", ["token", "completion", "episode"])
def test_weights_change_between_tokens_completions_or_episodes(root: Root, folder: str, swap: str) -> None:
    with working(root, swap=swap) as (engine, end):
        wait_until(lambda: len(versions(root)) > 8)
        for version in (1, 2, 3):
            publish(root, folder, budget=10**6)
            wait_until(lambda version=version: any(version in of_row for of_row in versions(root)))
        end()
    rows = committed_rows(root, "agent_steps", "policy_version", "policy_version_last", "weight_versions")
    of_rows = versions(root)
    assert all(of_row == sorted(of_row) for of_row in of_rows)
    assert [(row["policy_version"], row["policy_version_last"]) for row in rows] == [
        (of_row[0], of_row[-1]) for of_row in of_rows
    ]
    begins = [{step["start"] for step in row["agent_steps"]} for row in rows]
    changes = [{span["start"] for span in row["weight_versions"] or ()} for row in rows]
    assert any(len(of_row) > 1 for of_row in of_rows) == (swap != "episode")
    assert any(change - begin for change, begin in zip(changes, begins, strict=True)) == (swap == "token")
    assert engine.most_running == 8


@pytest.mark.slow
@pytest.mark.parametrize("swap", ["token", "completion", "episode"])
def test_completions_begin_again_when_weights_have_failed_half_way(root: Root, folder: str, swap: str) -> None:
    with working(root, swap=swap) as (engine, end):
        wait_until(lambda: len(versions(root)) > 8)
        engine.fails_to_load = 1
        publish(root, folder, budget=10**6)
        wait_until(lambda: engine.half_loaded is not None and engine.num_running == 0)
        publish(root, folder, budget=10**6)
        wait_until(lambda: any(2 in of_row for of_row in versions(root)))
        num_groups = end()
    rows = committed_rows(root, "error", "request_index")
    assert {row["error"] for row in rows} == {None}
    assert len(rows) == 2 * num_groups


@pytest.mark.slow
def test_groups_that_have_begun_are_given_up_and_sampled_by_the_next_life(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ludic.rollouts.worker")
    with working(root) as (engine, end):
        wait_until(lambda: len(versions(root)) > 8 and engine.num_running == 8)
        num_groups = end()
    assert "gave up " in caplog.text
    assert "the next life of the slot samples these groups first" in caplog.text
    numbers = {row["request_index"] // 2 for row in committed_rows(root, "request_index")}
    assert len(numbers) == num_groups
    missing = min(set(range(100)) - numbers)
    with working(root, num_groups=4) as (_, end):
        wait_until(lambda: len(versions(root)) == 2 * (num_groups + 4))
    numbers = {row["request_index"] // 2 for row in committed_rows(root, "request_index")}
    assert missing in numbers
    assert len(numbers) == num_groups + 4


@pytest.mark.slow
def test_complete_groups_are_stored_if_the_engine_dies(
    root: Root, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludic.rollouts.worker._SHORTEST_AGE_S", 4.0)  # as after answers of 40 s
    with working(root) as (engine, end):
        wait_until(lambda: engine.num_done >= 30)
        assert versions(root) == []
        engine.is_dead = True
        wait_until(lambda: versions(root) != [])
        with pytest.raises(EngineError, match="the engine is gone"):
            end()
    rows = committed_rows(root, "request_index", "error")
    assert len(rows) >= 8
    assert {row["error"] for row in rows} == {None}
    with ludic.connect(root.url) as con:
        outcomes = dict(con.sql("select outcome, count(*) from requests group by outcome").fetchall())
    assert outcomes["complete"] == len(rows) / 2
    assert outcomes.keys() == {"complete", "given_up"}


@pytest.mark.slow
def test_a_group_that_is_closed_early_keeps_what_its_other_episodes_had_sampled(tmp_path: Path, folder: str) -> None:
    root = create(tmp_path, folder, group_size=4, close_groups_at=3)
    with working(root, num_groups=6) as (_, end):
        wait_until(lambda: len(versions(root)) == 24)
        assert end() == 6
    rows = committed_rows(root, "group_id", "group_index", "group_size", "error", "episode_reward", "action_length")
    assert {row["group_size"] for row in rows} == {4}
    given_up = {(row["group_id"], row["group_index"]): row["action_length"] for row in rows if row["error"]}
    assert {row["error"] for row in rows} == {None, GROUP_CLOSED}
    num_given_up = Counter(group_id for group_id, _ in given_up)
    assert set(num_given_up.values()) == {1}
    assert len(num_given_up) >= 3  # on a busy machine, the last two episodes of a group may end at the same moment
    assert {row["episode_reward"] for row in rows} == {None, 2.0}
    assert set(given_up.values()) <= {0, TOKENS, 2 * TOKENS}  # of whole completions
    with ludic.connect(root.url) as con:
        groups = con.sql("select group_id, group_size, num_ended, outcome from requests").fetchall()
        episodes = con.sql("select group_id, group_index, num_tokens, outcome from request_episodes").fetchall()
        errors = con.sql("select sum(num_errors) from metrics").fetchall()
    assert len(groups) == 6
    assert all(group == (group[0], 4, 4 - num_given_up[group[0]], "complete") for group in groups)
    assert {(group, index): tokens for group, index, tokens, outcome in episodes if outcome == "given_up"} == given_up
    assert errors == [(0,)]
