"""The rollout worker: follow the newest policy, sample its quota of groups, append them.

Reads policies/, writes rollouts/, metrics/ and its claim in workers/. It shares nothing with the trainer
but the root, so it may start first, die, or be joined by others. On SIGTERM what was sampled is flushed; on SIGKILL
the groups being sampled are lost, and made first by the next life of the same slot. While the
filesystem fails it waits and tries again.
"""

import contextlib
import itertools
import logging
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ludic.bounds import check_numbers
from ludic.environments.registry import EnvironmentFactory
from ludic.errors import ModelError, SchemaError, StoreError
from ludic.inference.chat import load_tokenizer
from ludic.inference.engine import Engine
from ludic.interaction.limits import ENV_TIMEOUT_S, TimeLimit, limited
from ludic.interaction.single_step import Agent
from ludic.records import RolloutBatch
from ludic.rollouts.code import open_environments
from ludic.rollouts.metrics import call_metrics
from ludic.rollouts.sampler import GroupSampler
from ludic.rollouts.schedule import Schedule, new_slot, new_worker_id, read_earlier_lives
from ludic.store import LatestPolicy, MetricsLog, RolloutWriter, Root, fetch_policy, latest_policy
from ludic.store.code import to_dicts, warn_of_other_code
from ludic.store.slots import check_holds_slot, code_before, held_slot
from ludic.store.troubles import find_sampling_troubles, warn_of_rows

logger = logging.getLogger(__name__)

_IDLE_S = 10.0
"""Seconds without anything to sample after which a worker logs why."""

MakeEngine = Callable[[str, int], Engine]
"""From a folder of weights and their version."""

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.01, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker; what it shares with others is in run.json."""

    slot: int | None = None
    """Which part of the run's schedule is sampled; a restarted worker keeps its slot. None: a new one at random."""
    groups_per_call: int = 8
    """Most groups sampled in one call of the engine, and stored in one file."""
    num_groups: int | None = None
    """Stop after so many groups. None: follow the policies until told to stop."""
    follow_quota: bool = True
    """Sample no more of a version than the trainer asks for. Off: sample the newest version without end."""
    env_timeout_s: float | None = ENV_TIMEOUT_S
    """Seconds that one call of an environment may take; an episode that takes longer fails. None: no limit."""

    def __post_init__(self) -> None:
        check_numbers(self)


def run_worker(
    root: Root,
    config: WorkerConfig,
    make_engine: MakeEngine,
    stop: threading.Event,
    report: Callable[[RolloutBatch], None] | None = None,
    announce: Callable[[str], None] | None = None,
) -> int:
    """Sample until `stop` is set or num_groups are committed; returns the groups committed.

    `report` is told of each batch after it was handed to the writer, `announce` of each call of an environment, and
    "" when it is over. Raises SlotTakenError once a newer worker has claimed the slot, TimeLimitError where an
    environment gives no example in time.
    """
    slot = new_slot() if config.slot is None else config.slot
    schedule, worker_id = Schedule.of_slot(root.run, slot), new_worker_id(slot)
    environments, code = open_environments(root)
    with (
        held_slot(root, slot, worker_id, code=to_dicts(code)) as claim,
        tempfile.TemporaryDirectory(prefix="ludic-weights-") as cache,
        RolloutWriter(root, worker_id) as writer,
        contextlib.closing(MetricsLog(root, "worker", worker_id)) as log,
    ):
        warn_of_other_code(code_before(root, claim), code, where=f"life {claim.life - 1} of slot {slot}")
        # After the claim: an earlier life that still runs commits little from now on.
        lives = read_earlier_lives(root, slot)
        numbers, made = schedule.missing(lives.positions), lives.groups_by_version
        num_made = 0
        check_slot = partial(check_holds_slot, root, claim)
        warn = warn_of_rows(logger, partial(find_sampling_troubles, run=root.run))
        limit = TimeLimit(timeout_s=config.env_timeout_s, announce=announce)
        limited_environments = {name: limited(name, make, limit) for name, make in environments.items()}
        follower = _PolicyFollower(root, Path(cache), make_engine, limited_environments)
        while not stop.is_set() and num_made != config.num_groups:
            waited_since = time.monotonic()
            num_groups = _wait_for_quota(follower, config, made, num_made, stop)
            if num_groups == 0:
                break
            _persist(stop, check_slot)
            sampling_since = time.monotonic()
            version = follower.version
            batch = follower.sampler.sample(list(itertools.islice(numbers, num_groups)), worker_id)
            step_s = time.monotonic() - sampling_since
            _persist(stop, check_slot)
            _persist(stop, partial(writer.append, batch))
            # Not later: what is sampled should be safe before the next call begins, and the trainer may wait for it.
            _persist(stop, partial(writer.flush, wait=False))
            made[version] += num_groups
            num_made += num_groups
            for row in call_metrics(batch, wait_s=sampling_since - waited_since, step_s=step_s):
                _persist(stop, partial(log.write, **row))
                warn(row)
            if report is not None:
                report(batch)
        _persist(stop, writer.flush)
    return num_made


def _persist(stop: threading.Event, write: Callable[[], None]) -> None:
    """Write, and again while the filesystem fails; once told to stop, a last time, and raise what it raises.

    A writer's error is that of an earlier write, which it tries again by itself; it has not taken what it was given.
    """
    for wait_s in _back_off():
        try:
            return write()
        except StoreError as error:
            logger.warning("trying again: %s", error)
        if stop.wait(wait_s):
            break
    return write()


def _wait_for_quota(
    follower: "_PolicyFollower", config: WorkerConfig, made: Counter[int], num_made: int, stop: threading.Event
) -> int:
    """How many groups to sample next; 0 when told to stop. Follows the newest policy meanwhile."""
    began, said = time.monotonic(), False
    for wait_s in _back_off():
        latest = follower.follow()
        if latest is not None:
            quota = latest.groups_per_worker - made[follower.version] if config.follow_quota else config.groups_per_call
            remaining = quota if config.num_groups is None else min(quota, config.num_groups - num_made)
            if remaining > 0:
                return min(remaining, config.groups_per_call)
        if not said and time.monotonic() - began >= _IDLE_S:
            said = True
            logger.info("%s", _why_idle(follower, latest, made))
        if stop.wait(wait_s):
            break
    return 0


def _why_idle(follower: "_PolicyFollower", latest: LatestPolicy | None, made: Counter[int]) -> str:
    if latest is None:
        return "waiting for a policy that can be loaded; `ludic train` publishes policies"
    return (
        f"nothing to sample: the trainer asks for {latest.groups_per_worker} groups of version {follower.version}, "
        f"{made[follower.version]} were sampled; waiting for a new version"
    )


def _back_off() -> Iterator[float]:
    wait_s = _SHORTEST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(wait_s * 1.2, _LONGEST_WAIT_S)


class _PolicyFollower:
    """Keeps an engine on the newest policy that can be loaded; never goes back to a lower version."""

    def __init__(
        self, root: Root, cache: Path, make_engine: MakeEngine, environments: Mapping[str, EnvironmentFactory]
    ) -> None:
        self._root, self._cache, self._make_engine, self._environments = root, cache, make_engine, environments
        self._sampler: GroupSampler | None = None
        self._complained: str | None = None

    @property
    def sampler(self) -> GroupSampler:
        assert self._sampler is not None, "follow has not found a policy yet"
        return self._sampler

    @property
    def version(self) -> int:
        return self.sampler.agent.engine.policy_version

    def follow(self) -> LatestPolicy | None:
        """Load the newest policy if it is newer; None while there is none that could be loaded.

        A policy that is missing or half-written leaves the old weights in place and is tried again.
        """
        try:
            latest = latest_policy(self._root)
            if latest is not None and (self._sampler is None or latest.version > self.version):
                self._load(latest.version)
        except (FileNotFoundError, ModelError, SchemaError, StoreError) as error:
            self._complain(error)
            latest = None
        return None if self._sampler is None else latest

    def _load(self, version: int) -> None:
        try:
            self._use(fetch_policy(self._root, version, self._cache), version)
        except ModelError:
            # The copy may be what is broken: the next look fetches it again.
            shutil.rmtree(self._cache, ignore_errors=True)
            raise

    def _use(self, folder: str, version: int) -> None:
        if self._sampler is None:
            agent = Agent(
                engine=self._make_engine(folder, version),
                tokenizer=load_tokenizer(folder),
                model=self._root.run.model,
            )
            self._sampler = GroupSampler(run=self._root.run, agent=agent, environments=self._environments)
        else:
            self._sampler.agent.engine.load_weights(folder, version)

    def _complain(self, error: Exception) -> None:
        """Once a policy, not at every look."""
        if str(error) != self._complained:
            self._complained = str(error)
            logger.warning("waiting for a policy that can be loaded: %s", error)
