"""A worker's stream while steps block its event loop: budget, age of a commit and stop hold, and no group is lost.

The worker is whole but for its engine and the writer of files. A trainer writes LATEST by its own budget.
Time is simulated: a step that blocks moves the clock of the event loop, in which nothing else runs meanwhile.
"""

import asyncio
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine
from tiny_models import publish

from benchmarks.in_flight import Clock, NoWaits, without_threads
from ludic.errors import EngineError
from ludic.records.rollout import GroupEvent, RolloutBatch, RolloutGroup
from ludic.rollouts.config import WorkerConfig
from ludic.rollouts.scheduler import BegunGroup, Finished, Scheduler
from ludic.rollouts.weight_sync import SwapTimes
from ludic.rollouts.worker import Stream, opened_stream
from ludic.root.json_records import LatestPolicy
from ludic.root.root import Root
from ludic.root.rows.writer import FLUSH_AGE_S, MadeFile
from ludic.root.weights.policies import point_latest
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root, run_of
from ludic.training.batches.budget import Budget

STEPS = """
import asyncio
import itertools
import random
import time

from ludic.environments.environment import Example, Transition
from ludic.records.rollout import Message


class Steps:
    run_in = "loop"
    numbers = itertools.count()

    def __init__(self, longest_s, share_awaited, share_failed, most_steps, seed):
        self.longest_s, self.share_awaited, self.share_failed = longest_s, share_awaited, share_failed
        self.most_steps, self.chance = most_steps, random.Random(1000 * seed + next(self.numbers))

    def example(self, index, split):
        time.sleep(self.seconds())
        return Example(example_id=str(index), messages=(Message(role="user", content="what is 2"),))

    def reset(self, example):
        self.num_left = self.chance.randint(1, self.most_steps)
        return example.messages

    def step(self, action):
        if self.chance.random() < self.share_awaited:
            return self.awaited()
        time.sleep(self.seconds())
        return self.stepped()

    async def awaited(self):
        await asyncio.sleep(self.seconds())
        return self.stepped()

    def stepped(self):
        self.num_left -= 1
        if self.chance.random() < self.share_failed:
            raise RuntimeError("this step fails")
        return Transition(observation="what is 2", reward=1.0, terminated=self.num_left == 0)

    def seconds(self):
        return self.chance.choice((0.0, self.chance.uniform(0, self.longest_s), self.longest_s))
"""

SHORTEST_AGE_S, TICK_S = 0.05, 0.1
"""As of the worker: the least age of a commit, and the seconds between looks at `stop`."""
MOST_ROUNDS_OF_A_RUN = 20_000
MOST_ROUNDS = 8
"""Rounds of the event loop from the moment that something is due to the moment that the worker does it. In a round each
task that is ready goes on once, so it holds at most a blocking step of each episode. The worker needs five: its timer,
the end of its wait (three rounds in Python 3.11), and the task that commits; one more if another one commits."""


@dataclass(frozen=True)
class Case:
    """What the worker samples, and how it ends."""

    longest_s: float
    share_awaited: float
    share_failed: float
    most_steps: int
    group_size: int
    close_groups_at: int | None
    groups_per_batch: int
    batches_ahead: int
    in_flight: int | None
    max_batch: int
    follow_budget: bool
    train_s: float
    seed: int
    end: str
    """groups: all of `num_groups` are committed. give_up: told to stop. fails: following LATEST fails."""
    num_groups: int
    end_s: float

    @property
    def most_running(self) -> int:
        return 8 * self.max_batch if self.in_flight is None else self.in_flight


cases = st.builds(
    Case,
    longest_s=st.sampled_from([0.0, 0.005, 0.05, 0.5]),
    share_awaited=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    share_failed=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    most_steps=st.integers(1, 4),
    group_size=st.integers(1, 4),
    close_groups_at=st.none() | st.just(1),
    groups_per_batch=st.integers(1, 4),
    batches_ahead=st.integers(0, 2),
    in_flight=st.none() | st.integers(1, 8),
    max_batch=st.integers(1, 4),
    follow_budget=st.sampled_from([True, True, True, False]),
    train_s=st.sampled_from([0.0, 0.1, 2.0]),
    seed=st.integers(0, 999),
    end=st.sampled_from(["groups", "give_up", "fails"]),
    num_groups=st.integers(1, 16),
    # At 0 the stream would not have begun.
    end_s=st.floats(0.0, 3.0, exclude_min=True),
)


class Rounds(NoWaits):
    """Counts the rounds of an event loop, and what blocks it."""

    def __init__(self) -> None:
        super().__init__()
        self.began_s: list[float] = []
        """Time at the beginning of each round."""
        self.num_blocking = self.most_blocking = 0
        """Calls that have blocked the loop in this round, and most in a round."""
        self.blocked_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(timeout)
        assert len(self.began_s) < MOST_ROUNDS_OF_A_RUN, "the worker does not end"
        self.began_s.append(self.now_s)
        self.num_blocking = 0
        return found

    def block(self, seconds: float) -> None:
        """As time.sleep."""
        self.now_s, self.blocked_s = self.now_s + seconds, self.blocked_s + seconds
        self.num_blocking += seconds > 0
        self.most_blocking = max(self.most_blocking, self.num_blocking)

    def since(self, time_s: float) -> int:
        """Number of rounds that have begun since a time."""
        return len(self.began_s) - bisect_left(self.began_s, time_s)


class Writer:
    """Keeps what is appended, instead of files."""

    files: list[MadeFile]
    """Of the newest writer."""

    def __init__(self, root: Root, worker_id: str) -> None:
        self.worker_id, self.made, type(self).files = worker_id, deque[MadeFile](), []

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None: ...

    def append(self, batch: RolloutBatch | None, events: Sequence[GroupEvent]) -> None:
        if batch is not None:
            file = MadeFile(self.worker_id, len(self.files), 0, len(batch.groups))
            self.made.append(file)
            self.files.append(file)

    def flush(self, *, wait: bool = True) -> None: ...


class Trainer:
    """Reads what is appended, takes `train_s` a step, and writes LATEST; its version stays 0."""

    def __init__(self, root: Root, clock: Clock, train_s: float) -> None:
        self._root, self.clock, self._train_s, self._budget = root, clock, train_s, Budget(run_of(root), None)
        self._num_files_read = 0
        self._num_read = self._num_ready = self._step = 0
        self._ends_s: float | None = None
        """When the step that is being trained ends."""
        self.told: list[tuple[LatestPolicy, int]] = []
        """Each LATEST, and how many groups had been read."""
        self._budget.on_publish(0, 0)
        self._tell()

    async def run(self) -> None:
        while True:
            self.turn()
            await asyncio.sleep(0.2)

    def turn(self) -> None:
        now_s, size = self.clock.time(), run_of(self._root).groups_per_batch
        for file in Writer.files[self._num_files_read :]:
            self._num_files_read += 1
            self._num_read, self._num_ready = self._num_read + file.num_groups, self._num_ready + file.num_groups
            groups = [f"{file.sequence}-{number}" for number in range(file.num_groups)]
            rows = [{"worker_id": file.worker_id, "sequence": file.sequence, "group_id": group} for group in groups]
            self._budget.note_arrivals(pa.Table.from_pylist(rows), self._num_ready)
        if self._ends_s is not None and now_s >= self._ends_s:
            self._ends_s = None
            self._budget.on_publish(0, self._step)
            self._tell()
        if self._ends_s is None and self._num_ready >= size:
            self._step, self._num_ready, self._ends_s = self._step + 1, self._num_ready - size, now_s + self._train_s
            self._budget.on_plan(self._step, self._num_ready)
        elif self._ends_s is None:
            self._budget.on_wait(self._num_ready, size - self._num_ready, 0.0)
            if self._budget.has_room:
                self._tell()

    def num_read(self, latest: LatestPolicy) -> int:
        """Number of groups that had been read when it wrote a LATEST."""
        return max(num_read for told, num_read in self.told if told == latest)

    def _tell(self) -> None:
        self.told.append((self._budget.make_latest(), self._num_read))
        point_latest(self._root, self.told[-1][0])


class Watch:
    """Checks each start and each append of a stream, and keeps what happened."""

    def __init__(self, case: Case, rounds: Rounds, trainer: Trainer, stream: Stream) -> None:
        self._case, self._rounds, self._trainer, self._stream = case, rounds, trainer, stream
        self.started: list[int] = []
        self.due_s: dict[str, float] = {}
        """By group_id, the time from which on a finished group is to be appended."""
        self.appended: list[RolloutGroup] = []
        self.idle_s = self.measured_s = self.measured_until_s = 0.0
        """Sums of what rows of metrics say, and the time of the last one."""
        self.events: list[tuple[str, int]] = []
        self.told_to_end_s: float | None = None
        self.is_closed = False
        self._append, stream._store.append = stream._store.append, self.append  # type: ignore[method-assign]
        self._follow, stream._weight_sync.follow = stream._weight_sync.follow, self.follow  # type: ignore[method-assign]
        if case.end == "give_up":
            trainer.clock.call_at(case.end_s, self.stop)

    def stop(self) -> None:
        self.told_to_end_s = self._trainer.clock.time()
        self._stream._stop.set()

    def follow(self) -> LatestPolicy | None:
        now_s = self._trainer.clock.time()
        if self._case.end == "fails" and now_s >= self._case.end_s:
            self.told_to_end_s = now_s
            raise EngineError("following fails")
        return self._follow()

    def on_close(self) -> None:
        self.is_closed = True
        if self.told_to_end_s is not None:
            late = self._rounds.since(self.told_to_end_s + TICK_S)
            assert late <= MOST_ROUNDS, f"ended {late} rounds after it was told to"

    def on_start(self, number: int) -> None:
        latest = self._stream._latest
        assert latest is not None
        assert not self._stream._stop.is_set()
        if self._case.follow_budget:
            num_open = len(self.started) - self._trainer.num_read(latest)
            assert num_open + latest.num_ready < latest.budget, f"group {number} is beyond the budget"
        self.started.append(number)

    def on_finish(self, finished: Finished) -> None:
        if self.is_closed:  # it has been given up
            return
        age_s = max(SHORTEST_AGE_S, min(0.1 * finished.sampled_s, FLUSH_AGE_S))
        # A timer takes 1 ms at least.
        self.due_s[finished.begun.requests[0].group_id] = finished.ended_s + age_s + 0.001

    def append(
        self, batch: RolloutBatch | None, events: Sequence[GroupEvent], times: SwapTimes, metrics: Mapping[str, Any]
    ) -> None:
        self.events += [(event.event, event.group_number) for event in events]
        for group in batch.groups if batch else ():
            late = self._rounds.since(self.due_s[group.rollouts[0].group_id])
            assert late <= MOST_ROUNDS, f"appended {late} rounds after it was due"
            self.appended.append(group)
        if batch:
            self.idle_s += metrics["wait_s"]
            self.measured_s += metrics["wait_s"] + metrics["step_s"]
            self.measured_until_s = self._trainer.clock.time()
        self._append(batch, events, times, metrics)


def watched_pump(watches: Sequence[Watch]) -> type[Scheduler]:
    """watches: the one watch, once there is a stream."""

    class Watched(Scheduler):
        def start(self, number: int, *args: Any) -> BegunGroup:
            watches[0].on_start(number)
            return super().start(number, *args)

        def _finish(self, group: BegunGroup) -> None:
            super()._finish(group)
            watches[0].on_finish(self._finished[-1])

        async def close(self) -> None:
            watches[0].on_close()
            await super().close()

    return Watched


def create(path: Path, folder: str, case: Case) -> Root:
    (path / "steps.py").write_text(STEPS)
    env = f"{path}/steps.py:Steps"
    options = ("longest_s", "share_awaited", "share_failed", "most_steps", "seed")
    run = RunConfig(
        model=folder,
        env=(env,),
        env_options={env: {name: getattr(case, name) for name in options}},
        group_size=case.group_size,
        close_groups_at=case.close_groups_at,
        groups_per_batch=case.groups_per_batch,
        batches_ahead=case.batches_ahead,
        num_workers=1,
        seed=case.seed,
        max_tokens=8,
        accept_incomplete=True,
    )
    root = create_root(str(path / "run"), run)
    publish(root, folder, budget=0)
    return root


STALLS = Case(
    longest_s=0.05,
    share_awaited=0.0,
    share_failed=0.0,
    most_steps=4,
    group_size=2,
    close_groups_at=None,
    groups_per_batch=2,
    batches_ahead=1,
    in_flight=None,
    max_batch=4,
    follow_budget=True,
    train_s=0.1,
    seed=0,
    end="groups",
    num_groups=16,
    end_s=0.0,
)
"""An ordinary environment whose steps take up to 50 ms."""


@pytest.mark.slow
@settings(max_examples=10)
@given(case=cases)
@example(case=STALLS)
@example(case=replace(STALLS, follow_budget=False, end="give_up", end_s=2.0))
def test_whatever_blocks_the_loop_budget_age_and_stop_hold_and_no_group_is_lost(
    case: Case, folder: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, stop, rounds = create(tmp_path_factory.mktemp("case"), folder, case), threading.Event(), Rounds()
    config = WorkerConfig(
        slot=0,
        in_flight=case.in_flight,
        follow_budget=case.follow_budget,
        num_groups=case.num_groups if case.end == "groups" else None,
        env_timeout_s=None,
    )
    watches: list[Watch] = []
    with ExitStack() as stack:
        clock = stack.enter_context(Clock(rounds))
        stack.enter_context(without_threads())
        stack.enter_context(mock.patch.object(time, "sleep", rounds.block))
        stack.enter_context(mock.patch("ludic.rollouts.worker.Scheduler", watched_pump(watches)))
        stack.enter_context(mock.patch("ludic.rollouts.worker.RolloutWriter", Writer))
        trainer = Trainer(root, clock, case.train_s)
        stream = stack.enter_context(
            opened_stream(root, config, lambda folder, version: SimulatedEngine(case.max_batch), stop)  # type: ignore[arg-type]
        )
        watches.append(Watch(case, rounds, trainer, stream))
        assert stream.wait_for_policy()
        training = clock.create_task(trainer.run())
        with pytest.raises(EngineError, match="following fails") if case.end == "fails" else nullcontext():
            clock.run_until_complete(stream.run())
        training.cancel()
    (watch,) = watches
    assert rounds.most_blocking <= case.most_running + 1  # a step of each episode, and the next example
    # A worker whose loop is blocked is busy, and all of its time is counted.
    assert watch.idle_s + rounds.blocked_s <= clock.time() + 1e-3
    assert watch.measured_s == pytest.approx(watch.measured_until_s, abs=1e-3)
    ends = Counter(event for event, _ in watch.events)
    by_event = {kind: sorted(number for event, number in watch.events if event == kind) for kind in ends}
    numbers = by_event.get("complete", [])
    assert by_event.get("started", []) == watch.started == list(range(len(watch.started)))
    assert sorted(numbers + by_event.get("given_up", [])) == watch.started
    assert len(watch.due_s) == len(watch.appended) == len(numbers) == stream.num_committed
    requests = sorted(rollout.request_index for group in watch.appended for rollout in group.rollouts)
    assert requests == [number * case.group_size + index for number in numbers for index in range(case.group_size)]
    if case.end == "groups":
        assert stream.num_committed == case.num_groups
    if case.end == "groups":
        assert ends["given_up"] == 0
