"""A run of many workers and a trainer in one process, on a clock of its own: every file and request is real.

Workers do what `ludic.rollouts.worker.run_worker` does with the store: they read LATEST, fetch weights, check their
claim, append and flush groups, and log metrics. Sampling is fake: it takes time on the clock, and repeats one batch
under new ids. The trainer's source, planner, ledger, reading and publishing are ludic's own; a training step is time on
the clock. Real seconds that the trainer's batch thread spends are seconds of the clock, and its pauses are when workers
act; the workers' own work takes no time. No lease is renewed, and no checkpoint is written.
"""

import heapq
import itertools
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from benchmarks.rollouts import make_batch
from ludic.records import RolloutBatch, RolloutGroup, new_id
from ludic.rollouts import Schedule, new_worker_id, stream_metrics
from ludic.rollouts import worker as real_worker
from ludic.root import LatestPolicy, Root, check_holds_slot, claim_slot, start_attempt
from ludic.root.rows import MetricsLog, RolloutReader, RolloutWriter, reader, write_ledger
from ludic.root.weights import fetch_policy, latest_policy, point_latest
from ludic.run import run_of
from ludic.training import Publisher, TrainConfig
from ludic.training.batches import OnlineSource, online, read_rank_batch

GROUP_SIZE, GROUPS_PER_CALL = 8, 8
TOKENS = 32
"""Tokens of a prompt, and mean tokens of a response."""
FIRST_VERSION = 10
"""Version of the first weights: high enough that the window of versions that a poll lists is full from the start."""
ROLLOUTS_A_SECOND = 10.0
"""Rollouts that a worker samples in a second of the clock."""
_TEMPLATE = make_batch(GROUPS_PER_CALL, mean_length=TOKENS, prompt_length=TOKENS, group_size=GROUP_SIZE)


PARTS = ("listing", "poll", "add", "plan", "shortage", "consume", "ledger", "read")
"""Timed parts of the trainer's batch thread; the listing is within the poll."""


class Clock(threading.Event):
    """The time of the run, in seconds; waiting for this event moves it on, and runs what is due."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._real_since: float | None = None
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Return the time; within `running`, real seconds count."""
        return self._now_s + (0.0 if self._real_since is None else time.perf_counter() - self._real_since)

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        """Call a function with the time when it is due."""
        heapq.heappush(self._due, (time_s, next(self._order), call))

    @contextmanager
    def running(self) -> Iterator[None]:
        self._real_since = time.perf_counter()
        yield
        self._now_s, self._real_since = self.monotonic(), None

    def wait(self, timeout: float | None = None) -> bool:
        """Move the time on, and run what is due, which takes no time of the clock."""
        until_s, was_running = self.monotonic() + (timeout or 0.0), self._real_since is not None
        while self._due and self._due[0][0] <= until_s:
            time_s, _, call = heapq.heappop(self._due)
            call(time_s)
        self._now_s, self._real_since = until_s, time.perf_counter() if was_running else None
        return self.is_set()


@dataclass
class Times:
    """Real seconds of each call of the trainer's parts, by part."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_listed: list[int] = field(default_factory=list)
    """Names in each listing of rollouts."""
    asks: Counter[int] = field(default_factory=Counter)
    """Reads of LATEST by workers, by second of the clock."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """Sum of the seconds of each part, by step."""

    @contextmanager
    def taken(self, part: str) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.seconds[part].append(time.perf_counter() - since)

    def end_step(self) -> None:
        """Add the seconds since the step before to `steps`."""
        before = {part: sum(step[part] for step in self.steps) for part in PARTS}
        self.steps.append({part: sum(self.seconds[part]) - before[part] for part in PARTS})

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            with self.taken(part):
                return call(*args, **options)

        return timed


class Worker:
    """A worker of a slot; each method is a turn of `run_worker`, and puts the next turn on the clock."""

    def __init__(self, root: Root, clock: Clock, times: Times, slot: int, cache: Path) -> None:
        self._root, self._clock, self._times, self._cache = root, clock, times, cache
        self._schedule = Schedule.of_slot(run_of(root), slot)
        self._position = self.num_committed = 0
        self.worker_id = new_worker_id(slot)
        self._claim = claim_slot(root, slot, self.worker_id)
        self._writer = RolloutWriter(root, self.worker_id)
        self._log = MetricsLog(root, "worker", self.worker_id)
        self._store = real_worker._Store(root, self._writer, self._log, lambda: None, clock, [])
        self._version = -1
        self._latest: LatestPolicy | None = None
        self._pauses = real_worker.pauses_between_reads(root)

    def ask(self, now_s: float) -> None:
        """Follow the newest policy, and sample if the trainer asks for more groups."""
        self._times.asks[int(now_s)] += 1
        latest = latest_policy(self._root)
        if latest is None or latest.version < FIRST_VERSION:
            return self._clock.at(now_s + next(self._pauses), self.ask)
        if latest.version > self._version:
            fetch_policy(self._root, latest.version, self._cache)
            self._version = latest.version
        num_groups = min(latest.num_allowed(self._store.num_unread(latest)), GROUPS_PER_CALL)
        if num_groups <= 0:
            return self._clock.at(now_s + next(self._pauses), self.ask)
        check_holds_slot(self._root, self._claim)
        self._pauses, self._latest = real_worker.pauses_between_reads(self._root), latest
        step_s = num_groups * GROUP_SIZE / ROLLOUTS_A_SECOND
        return self._clock.at(now_s + step_s, partial(self._commit, num_groups))

    def _commit(self, num_groups: int, now_s: float) -> None:
        """Commit groups that were sampled, and ask again."""
        check_holds_slot(self._root, self._claim)
        batch = self._sampled(num_groups)
        self._writer.append(batch)
        self._writer.flush()
        self._store.begin(num_groups)
        self._store.expect(self._latest)
        self.num_committed += num_groups
        step_s = num_groups * GROUP_SIZE / ROLLOUTS_A_SECOND
        for row in stream_metrics(batch, wait_s=0.0, step_s=step_s, policy_version=self._version):
            self._log.write(**row)
        self._log._appender.flush()  # on the clock, the row is older than the second after which it is written
        self.ask(now_s)

    def _sampled(self, num_groups: int) -> RolloutBatch:
        groups = tuple(self._renewed(group) for group in _TEMPLATE.groups[:num_groups])
        return replace(_TEMPLATE, groups=groups, metadata=replace(_TEMPLATE.metadata, worker_id=self.worker_id))

    def _renewed(self, group: RolloutGroup) -> RolloutGroup:
        """Copy a group under new ids, as the next group of this worker's schedule."""
        number, group_id = self._schedule.start + self._position * self._schedule.stride, new_id()
        self._position += 1
        rollouts = tuple(
            replace(
                rollout,
                rollout_id=(rollout_id := new_id()),
                trajectory_id=rollout_id,
                group_id=group_id,
                episode_id=new_id(),
                request_index=number * GROUP_SIZE + index,
                policy_version=self._version,
                policy_version_last=self._version,
            )
            for index, rollout in enumerate(group.rollouts)
        )
        return replace(group, rollouts=rollouts)

    def close(self) -> None:
        self._writer.close()
        self._log.close()


class Trainer:
    """The only rank of a trainer, without a model."""

    def __init__(self, root: Root, clock: Clock, times: Times, train_s: float) -> None:
        """train_s: seconds of a step on the clock."""
        self._root, self._clock, self._times, self._train_s = root, clock, times, train_s
        self._config = TrainConfig.of(num_steps=1).batch
        self._attempt = start_attempt(root)
        point_latest(root, LatestPolicy(version=FIRST_VERSION - 1, budget=0))
        most = self._config.max_off_policy_steps
        self._publisher = Publisher(root, self._attempt, keep=4, max_off_policy_steps=most)
        note_arrivals = self._publisher.note_arrivals

        def count_arrivals(rows: pa.Table, num_ready_groups: int) -> None:
            self._num_delivered += len(rows["group_id"].unique())
            note_arrivals(rows, num_ready_groups)

        self._publisher.note_arrivals = count_arrivals  # type: ignore[method-assign]
        self.source = OnlineSource(root, self._config, clock)
        self.source.resume(None, self._publisher)
        self._num_delivered = 0
        self.used: set[str] = set()
        """group_ids of all plans."""
        self.waits_s: list[float] = []
        """Seconds that each step but the first waited for its batch."""
        self._time_parts()

    def train(self, num_steps: int) -> None:
        self._publish(0, self._clock.monotonic())
        self._next_batch(step=1)
        for step in range(1, num_steps + 1):
            over_s = self._clock.monotonic() + self._train_s
            self._clock.at(over_s, partial(self._publish, step))
            if step < num_steps:
                self._next_batch(step + 1)
            self.waits_s.append(max(0.0, self._clock.monotonic() - over_s))
            self._clock.wait(max(0.0, over_s - self._clock.monotonic()))

    def count_delivered(self) -> int:
        """Return the number of groups that were ever delivered, after a last poll."""
        rest = RolloutReader.poll(self.source._reader, None)
        last = 0 if rest is None else len(rest["group_id"].unique())
        return self._num_delivered + last

    def close(self) -> None:
        self._publisher.close()

    def _next_batch(self, step: int) -> None:
        """Plan a step, write its ledger, and read and pack its rollouts, as the stream's thread does."""
        with self._clock.running():
            plan = self.source.plan(step, attempt_id=self._attempt.attempt_id, trainer_version=FIRST_VERSION + step - 1)
            assert plan is not None
            with self._times.taken("ledger"):
                write_ledger(self._root, self._attempt, step, plan.rows)
            with self._times.taken("read"):
                read_rank_batch(self._root, self._config, plan, 0, 1)
        self._times.end_step()
        groups = set(plan.rows["group_id"].to_pylist())
        assert not groups & self.used, "a group was planned twice"
        self.used |= groups

    def _publish(self, step: int, now_s: float) -> None:
        self._publisher.publish(_save, step=step)

    def _time_parts(self) -> None:
        reader, planner, timed = self.source._reader, self.source._planner, self._times.timed
        for part, owner in (("poll", reader), ("add", planner), ("plan", planner), ("shortage", planner)):
            setattr(owner, part, timed(part, getattr(owner, part)))
        self.source._consume = timed("consume", self.source._consume)  # type: ignore[method-assign]


def _save(folder: Path) -> None:
    """Write weights of a few bytes: fetching more takes as many requests up to 16 MB a file."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def simulate(for_workers: Root, for_trainer: Root, *, num_steps: int, train_s: float) -> "Outcome":
    """Train for some steps. for_workers, for_trainer: the same root, each through a client of its own.

    Asserts that no group is planned twice, and that every committed group is delivered.
    """
    clock, times, num_workers = Clock(), Times(), run_of(for_workers).num_workers
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(online, "time", clock))
        stack.enter_context(mock.patch.object(reader, "list_names", _counted_listing(times, reader.list_names)))
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [Worker(for_workers, clock, times, slot, cache / str(slot)) for slot in range(num_workers)]
        for slot, worker in enumerate(workers):
            stack.callback(worker.close)
            # Starts spread over a call, as the ends of calls do after a while.
            clock.at(slot / num_workers * GROUPS_PER_CALL * GROUP_SIZE / ROLLOUTS_A_SECOND, worker.ask)
        trainer = Trainer(for_trainer, clock, times, train_s)
        stack.callback(trainer.close)
        trainer.train(num_steps)
    num_committed = sum(worker.num_committed for worker in workers)
    assert trainer.count_delivered() == num_committed, "a group was lost"
    return Outcome(num_workers, num_steps, num_committed * GROUP_SIZE, clock.monotonic(), trainer.waits_s, times)


def _counted_listing(times: Times, list_names: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def listing(*args: Any) -> list[str]:
        with times.taken("listing"):
            names = list_names(*args)
        times.num_listed.append(len(names))
        return names

    return listing


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run took."""

    num_workers: int
    num_steps: int
    num_rollouts: int
    """Rollouts that workers committed."""
    clock_s: float
    """Seconds of the clock."""
    waits_s: list[float]
    """Seconds of the clock that each step but the first waited for its batch."""
    times: Times
