"""Run a rollout worker: sample a stream of episodes with the newest policy, and append groups when they are complete.

Reads policies/, writes rollouts/, metrics/ and its claim in workers/. It shares only the root with the trainer, so it
may start first, die, or run beside other workers. An episode starts as soon as another one ends, and new weights are
loaded while episodes run. On SIGTERM, complete groups are flushed. On SIGKILL, the groups that were not complete, or
not yet flushed, are lost, and the next life of the same slot samples them first. If the filesystem fails, the worker
waits and tries again.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ludic.base import storable, temporary_folder
from ludic.engines import MakeEngine
from ludic.environments import Announce, LimitedEnvironments, TimeLimit, event_loops
from ludic.errors import ConfigError, EngineError, StoreError
from ludic.records import GroupEvent, GroupEventKind, RolloutBatch, RolloutMetadata
from ludic.rollouts.config import WorkerConfig
from ludic.rollouts.failures import FailureLog
from ludic.rollouts.group_schedule import Schedule, new_slot, new_worker_id, read_earlier_lives
from ludic.rollouts.metrics import stream_metrics
from ludic.rollouts.programs import most_in_flight
from ludic.rollouts.sampler import episodes_of_run, open_code
from ludic.rollouts.scheduler import BegunGroup, Finished, Scheduler, opened
from ludic.rollouts.weight_sync import SwapTimes, WeightSync
from ludic.root import (
    LatestPolicy,
    Root,
    check_holds_slot,
    check_not_recorded,
    code_before,
    held_slot,
    to_dicts,
    warn_of_other_code,
)
from ludic.root.rows import FLUSH_AGE_S, FLUSH_GROUPS, MadeFile, MetricsLog, RolloutWriter
from ludic.root.storage import back_off
from ludic.run import find_sampling_diagnostics, run_of, warn_of_rows
from ludic.settings import SideThread

logger = logging.getLogger(__name__)

_IDLE_S = 10.0
"""Seconds without work after which a worker logs the reason."""

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.01, 1.0
_BUSY_WAIT_S = 0.05
"""Shortest pause between reads of LATEST while episodes run, which reads would slow down."""
_READS_A_SECOND = 2000
"""Maximum reads of LATEST per second by all waiting workers of a run. S3 serves 5,500 GETs a second below a prefix;
1,000 workers that all begin with _SHORTEST_WAIT_S would send about 10,000 (benchmarks/scale.py)."""

_SHORTEST_AGE_S, _AGE_SHARE = 0.05, 0.1
"""A complete group waits for others, to write fewer files: at least this number of seconds, at most FLUSH_AGE_S, and in
between this share of its sampling time."""
_TICK_S = 0.1
"""Seconds between looks at `stop`: a signal does not wake an event loop."""


def run_worker(
    root: Root,
    config: WorkerConfig,
    make_engine: MakeEngine,
    stop: threading.Event,
    report: Callable[[RolloutBatch], None] | None = None,
    announce: Announce | None = None,
) -> int:
    """Sample until `stop` is set or num_groups are committed; returns the number of committed groups.

    report: called with each batch after it was passed to the writer. announce: of each call of an environment.
    Raises SlotTakenError if a newer worker has the slot, ReplacedRootError if the root is another run, TimeLimitError
    if loading an environment takes too long, and ConfigError if an environment gave no example many times in a row.
    """
    with opened_stream(root, config, make_engine, stop, report, announce) as stream:
        if stream.wait_for_policy():
            event_loops.run(stream.run())
    return stream.num_committed


@contextlib.contextmanager
def opened_stream(
    root: Root,
    config: WorkerConfig,
    make_engine: MakeEngine,
    stop: threading.Event,
    report: Callable[[RolloutBatch], None] | None = None,
    announce: Announce | None = None,
) -> Iterator["Stream"]:
    """Claim the slot, find the groups that its earlier lives committed, and yield the stream; at the end, flush and
    release."""
    check_not_recorded(root)
    slot = new_slot() if config.slot is None else config.slot
    run = run_of(root)
    schedule, worker_id = Schedule.of_slot(run, slot), new_worker_id(slot)
    limit = TimeLimit(timeout_s=config.env_timeout_s, announce=announce)
    environments, files, code = open_code(root, limit, stop=stop)
    episodes = partial(episodes_of_run, run, timeout_s=config.episode_timeout_s, files=files, root=root)
    with (
        held_slot(root, slot, worker_id, code=to_dicts(code)) as claim,
        temporary_folder("weights") as cache,
        RolloutWriter(root, worker_id) as writer,
        contextlib.closing(MetricsLog(root, "worker", worker_id)) as log,
    ):
        warn_of_other_code(code_before(root, claim), code, where=f"life {claim.life - 1} of slot {slot}")
        # Read after the claim: an earlier life that still runs stops at its next check of the claim.
        lives = read_earlier_lives(root, slot)
        stream = Stream(
            root,
            config,
            WeightSync(root, cache, make_engine, environments, episodes),
            environments=environments,
            numbers=schedule.missing(lives.positions),
            store=_Store(root, writer, log, partial(check_holds_slot, root, claim), stop, lives.files),
            report=report,
        )
        yield stream
        _persist(stop, writer.flush)


@dataclass(slots=True)
class _Unread:
    """A file of this worker that the trainer may not have read."""

    made: MadeFile
    attempt_id: int
    planned_step: int
    """Value from the LATEST that was known when its groups were complete."""

    def is_read(self, latest: LatestPolicy) -> bool:
        """True if the file counts as read, or never will be.

        A later trainer counts the files that it finds. Two plans after a file is written, it has been listed or left
        out for good.
        """
        return (
            self.made.sequence <= latest.seen.get(self.made.worker_id, -1)
            or self.made.version < latest.oldest_version
            or self.attempt_id != latest.attempt_id
            or self.planned_step + 2 <= latest.planned_step
        )


class _Store:
    """Appends complete groups; `append` may be called from any thread, one call at a time."""

    def __init__(
        self,
        root: Root,
        writer: RolloutWriter,
        log: MetricsLog,
        check_slot: Callable[[], None],
        stop: threading.Event,
        earlier: Sequence[MadeFile],
    ) -> None:
        """earlier: files of earlier lives."""
        self.stop, self.writer = stop, writer
        self._log, self._check_slot = log, check_slot
        self._failures = FailureLog(logger)
        self._warn = warn_of_rows(logger, partial(find_sampling_diagnostics, run=run_of(root)))
        self._num_unread = 0
        """Groups that have begun, and are in no file that counts as read: being sampled, complete, or appended."""
        self._known: LatestPolicy | None = None
        """LATEST as of the newest groups that are about to be appended."""
        self._unread: list[_Unread] = []
        self._of_earlier_lives: Sequence[MadeFile] = earlier

    def begin(self, num_groups: int = 1) -> None:
        """Count groups that begin, until the trainer has read them."""
        self._num_unread += num_groups

    def expect(self, latest: LatestPolicy | None) -> None:
        """Record that groups are about to be appended. latest: the newest known LATEST."""
        self._known = latest

    def num_unread(self, latest: LatestPolicy) -> int:
        """Return the number of groups that the trainer has not read, of this life and, if known, of the previous one.

        Groups of this life count from their start.
        """
        # Which groups of older lives the trainer has read is unknown; almost all of them were used.
        before = [file for file in self._of_earlier_lives if file.worker_id in latest.seen]
        self._num_unread += sum(file.num_groups for file in before)
        self._of_earlier_lives = ()
        self._unread += [_Unread(made, latest.attempt_id, latest.planned_step) for made in before]
        known = self._known or latest
        while self.writer.made:
            self._unread.append(_Unread(self.writer.made.popleft(), known.attempt_id, known.planned_step))
        num_before = sum(file.made.num_groups for file in self._unread)
        self._unread = [file for file in self._unread if not file.is_read(latest)]
        self._num_unread -= num_before - sum(file.made.num_groups for file in self._unread)
        return self._num_unread

    def append(
        self, batch: RolloutBatch | None, events: Sequence[GroupEvent], times: SwapTimes, metrics: Mapping[str, Any]
    ) -> None:
        """Append a batch, ends of groups, and metrics, and begin to flush.

        Flush at once, since groups should be safe soon and the trainer may wait. metrics: of the batch.
        """
        _persist(self.stop, self._check_slot)
        _persist(self.stop, partial(self.writer.append, batch, events))
        _persist(self.stop, partial(self.writer.flush, wait=False))
        if batch is None:
            return
        self._failures.take(rollout for group in batch.groups for rollout in group.rollouts)
        for row in stream_metrics(batch, **metrics, swap=times.take(metrics["policy_version"])):
            _persist(self.stop, partial(self._log.write, **row))
            self._warn(row)


class Stream:
    """Episodes in flight, those of the oldest group first, and the groups that they complete."""

    def __init__(
        self,
        root: Root,
        config: WorkerConfig,
        weight_sync: WeightSync,
        *,
        environments: Mapping[str, LimitedEnvironments],
        numbers: Iterator[int],
        store: _Store,
        report: Callable[[RolloutBatch], None] | None,
    ) -> None:
        """numbers: of the groups to sample, in order."""
        self._root, self._config, self._weight_sync = root, config, weight_sync
        self._environments, self._numbers = environments, numbers
        self._store, self._stop, self._report = store, store.stop, report
        self._latest: LatestPolicy | None = None
        self._num_started = self.num_committed = 0
        self._finished: list[Finished] = []
        self._events: list[GroupEvent] = []
        """Starts and ends of groups that are not appended yet."""
        self._idle_s, self._waited_for = 0.0, "budget"

    def wait_for_policy(self) -> bool:
        """Wait until there are weights to sample with; returns False if stopped before."""
        began, said = time.monotonic(), False
        for wait_s in pauses_between_reads(self._root):
            self._latest = self._weight_sync.follow()
            if self._latest is not None:
                return True
            if not said and time.monotonic() - began >= _IDLE_S:
                said = True
                logger.info("%s", self._why_idle())
            if self._stop.wait(wait_s):
                break
        return False

    async def run(self) -> None:
        """Sample until stopped, or until num_groups are committed. Needs a policy; see `wait_for_policy`."""
        self._calls = self._weight_sync.calls
        run_episode = self._weight_sync.sampler.run_episode
        self._scheduler = Scheduler(
            run_episode,
            self._environments,
            self._root.extra_columns,
            in_flight=self._config.in_flight or most_in_flight(run_of(self._root)),
            calls=self._calls,
            close_groups_at=run_of(self._root).close_groups_at,
        )
        self._committing: asyncio.Task[None] | None = None
        self._storing = SideThread()
        self._committed_at = self._appended_at = asyncio.get_running_loop().time()
        following = asyncio.create_task(self._follow())
        lost: EngineError | ConfigError | None = None
        try:
            async with opened(run_episode):
                try:
                    await self._sample(following)
                finally:
                    self._take(self._scheduler.take())
                    self._give_up()
                    following.cancel()
                    await self._scheduler.close()
        except (EngineError, ConfigError) as error:  # the engine or the environment fails; the store does not
            lost = error
        await self._commit_all()
        if lost is not None:
            raise lost

    async def _sample(self, following: "asyncio.Task[None]") -> None:
        clock, said, idle_since = asyncio.get_running_loop().time, False, None
        while not self._is_over():
            # One group per round, so that the rest of the round is not delayed by users' code that blocks the loop.
            has_begun = self._begin_group()
            began, is_idle = clock(), self._scheduler.is_idle
            self._take(await self._scheduler.wait(0.0 if has_begun else self._next_poll_s()))
            if is_idle:
                self._idle_s += clock() - began
                self._waited_for = "weights" if self._scheduler.is_paused else "budget"
            idle_since = (began if idle_since is None else idle_since) if is_idle else None
            if not said and idle_since is not None and clock() - idle_since >= _IDLE_S:
                said = True
                logger.info("%s", self._why_idle())
            if following.done():
                following.result()
            await self._commit_if_due()

    def _take(self, finished: Sequence[Finished]) -> None:
        self._finished += finished
        self._events += [self._event("complete", each.begun) for each in finished]

    def _is_over(self) -> bool:
        return self._stop.is_set() or (self._num_started == self._config.num_groups and self._scheduler.num_open == 0)

    def _begin_group(self) -> bool:
        """Begin the next group if there is room for it, and return whether it has begun."""
        if not self._scheduler.has_room or self._num_allowed() <= 0:
            return False
        number = next(self._numbers)
        begun = self._scheduler.start(number, self._weight_sync.sampler.episodes(number))
        self._store.begin()
        self._events.append(self._event("started", begun))
        self._num_started += 1
        return True

    def _num_allowed(self) -> int:
        """Return how many further groups may begin."""
        if self._stop.is_set() or self._latest is None:
            return 0
        most = 1 if self._config.num_groups is None else self._config.num_groups - self._num_started
        if self._config.follow_budget:
            most = min(most, self._latest.num_allowed(self._store.num_unread(self._latest)))
        return most

    # --- New weights -----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Follow LATEST. Raises ReplacedRootError."""
        thread, loop = SideThread(), asyncio.get_running_loop()

        def quiet() -> None:
            asyncio.run_coroutine_threadsafe(self._quiet(), loop).result()

        follow = self._weight_sync.follow if self._config.swap == "token" else partial(self._weight_sync.follow, quiet)
        waits = pauses_between_reads(self._root)
        try:
            while True:
                latest = await thread.run(follow)
                self._calls.release()
                self._scheduler.is_paused = False
                if latest is not None and latest != self._latest:
                    self._latest, waits = latest, pauses_between_reads(self._root)
                    self._scheduler.wake()
                await asyncio.sleep(next(waits) if self._scheduler.is_idle else max(next(waits), _BUSY_WAIT_S))
        finally:
            thread.close()
            self._scheduler.wake()

    async def _quiet(self) -> None:
        """Wait until no completion, or no episode, is running; then the weights change."""
        if self._config.swap == "completion":
            self._calls.hold()
        else:
            self._scheduler.is_paused = True
        while not self._calls.num_stuck and (
            self._calls.num_running if self._config.swap == "completion" else self._scheduler.num_running
        ):
            await asyncio.sleep(_SHORTEST_WAIT_S)

    # --- Complete groups -------------------------------------------------------------------------------------

    def _next_poll_s(self) -> float:
        if not self._events or self._committing is not None:
            return _TICK_S
        return max(0.001, min(_TICK_S, self._due_s() - asyncio.get_running_loop().time()))

    def _due_s(self) -> float:
        """Return the time at which the complete groups, or what became of others, are to be appended."""
        if (
            self._finished and self._scheduler.num_open == 0
        ):  # nothing to wait for, and perhaps the trainer waits for these
            return 0.0
        of_groups = [each.ended_s + _longest_wait_s(each.sampled_s) for each in self._finished]
        return min([self._appended_at + FLUSH_AGE_S, *of_groups])

    async def _commit_if_due(self) -> None:
        if self._committing is not None and self._committing.done():
            committing, self._committing = self._committing, None
            committing.result()
        if not self._events or self._committing is not None:
            return
        is_full = len(self._finished) >= FLUSH_GROUPS
        if is_full or asyncio.get_running_loop().time() >= self._due_s():
            self._committing = asyncio.create_task(self._commit())
            self._committing.add_done_callback(lambda _: self._scheduler.wake())

    async def _commit_all(self) -> None:
        if self._committing is not None:
            await self._committing
        if self._events:
            await self._commit()
        self._storing.close()

    async def _commit(self) -> None:
        """Append the complete groups and all events, in a thread, since that may wait for a filesystem."""
        self._appended_at = asyncio.get_running_loop().time()
        finished, self._finished = self._finished, []
        events, self._events = self._events, []
        self._store.expect(self._latest)
        batch, metrics = None, dict[str, Any]()
        if finished:
            groups = tuple(each.group for each in finished)
            batch = RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id=self._store.writer.worker_id))
            metrics = self._measure()
        await self._storing.run(partial(self._store.append, batch, events, self._weight_sync.times, metrics))
        if batch is None:
            return
        self.num_committed += len(finished)
        for environments in self._environments.values():
            environments.restart()
        if self._report is not None:
            self._report(batch)

    def _measure(self) -> dict[str, Any]:
        """Return the values of metrics rows about the time since the previous rows."""
        now = asyncio.get_running_loop().time()
        idle_s, self._idle_s = self._idle_s, 0.0
        step_s, self._committed_at = max(1e-6, now - self._committed_at - idle_s), now
        return {
            "wait_s": idle_s,
            "step_s": step_s,
            "policy_version": self._weight_sync.version,
            "num_running": self._scheduler.num_running,
            "waited_for": self._waited_for if idle_s > 0 else None,
        }

    def _event(self, event: GroupEventKind, begun: BegunGroup) -> GroupEvent:
        request = begun.requests[0]
        return GroupEvent(
            event=event,
            group_id=request.group_id,
            group_number=begun.number,
            env_name=request.env_name,
            env_example_id=storable(request.example.example_id),
            group_size=len(begun.requests),
            policy_version=self._weight_sync.version,
            created_at=datetime.now(UTC),
            episodes=None if event == "started" else begun.ends,
        )

    def _give_up(self) -> None:
        self._events += [self._event("given_up", begun) for begun in self._scheduler.open_groups]
        if self._scheduler.num_open:
            logger.info(
                "gave up %d episodes that ran, of %d groups; the next life of the slot samples these groups first",
                self._scheduler.num_running,
                self._scheduler.num_open,
            )

    def _why_idle(self) -> str:
        latest = self._latest
        if latest is None:
            return "waiting for a policy that can be loaded; `ludic train` publishes policies"
        if latest.budget is None:
            return "waiting for a trainer of this version of ludic, which sets how many groups may be open"
        return (
            f"nothing to sample: {latest.num_ready} groups are ready for the trainer, {self._store.num_unread(latest)} "
            f"of this worker are not read yet, and its budget is {latest.budget} for {latest.num_workers} "
            f"worker{'s' if latest.num_workers > 1 else ''}; waiting for a new version"
        )


def _longest_wait_s(sampled_s: float) -> float:
    return max(_SHORTEST_AGE_S, min(_AGE_SHARE * sampled_s, FLUSH_AGE_S))


def _persist(stop: threading.Event, write: Callable[[], None]) -> None:
    """Write, and retry while the filesystem fails; after `stop` is set, try once more and raise any error.

    An error of a writer belongs to an earlier write, which the writer retries itself; the new data was not accepted
    then.
    """
    for wait_s in back_off(_SHORTEST_WAIT_S, _LONGEST_WAIT_S):
        try:
            return write()
        except StoreError as error:
            logger.warning("trying again: %s", error)
        if stop.wait(wait_s):
            break
    return write()


def pauses_between_reads(root: Root) -> Iterator[float]:
    """Yield the seconds between reads of LATEST by a waiting worker."""
    return root.pauses(_SHORTEST_WAIT_S, _LONGEST_WAIT_S, least_s=run_of(root).num_workers / _READS_A_SECOND)
