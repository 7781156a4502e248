"""Rollout worker: follow the newest policy, sample its quota of groups, append them.

Reads policies/, writes rollouts/, metrics/ and its claim in workers/. It shares only the root with the trainer, so it
may start first, die, or run beside other workers. On SIGTERM, sampled groups are flushed. On SIGKILL, the groups being
sampled are lost, and the next life of the same slot samples them first. If the filesystem fails, the worker waits and
tries again.
"""

import contextlib
import itertools
import logging
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ludic.agents.agent import Agent
from ludic.engines.engine import Engine
from ludic.engines.registry import MakeEngine
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.errors import ModelError, NoServerError, SchemaError, StoreError
from ludic.models.chat import load_tokenizer
from ludic.records import RolloutBatch
from ludic.rollouts.config import WorkerConfig
from ludic.rollouts.metrics import call_metrics
from ludic.rollouts.sampler import GroupSampler, RunEpisode, episodes_of_run
from ludic.rollouts.sampling_code import open_code
from ludic.rollouts.schedule import Schedule, new_slot, new_worker_id, read_earlier_lives
from ludic.rollouts.swap_times import SwapTimes
from ludic.store import LatestPolicy, MetricsLog, RolloutWriter, Root, fetch_policy, latest_policy
from ludic.store.code_files import to_dicts, warn_of_other_code
from ludic.store.slots import check_holds_slot, code_before, held_slot
from ludic.store.troubles import find_sampling_troubles, warn_of_rows

logger = logging.getLogger(__name__)

_IDLE_S = 10.0
"""Seconds without work after which a worker logs the reason."""

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.01, 1.0
_READS_A_SECOND = 2000
"""Most reads of LATEST in a second by all waiting workers of a run. S3 serves 5,500 GETs a second below a prefix; 1,000
workers that all begin with _SHORTEST_WAIT_S would send about 10,000 (benchmarks/scale.py)."""
_REFUSED_S = 10.0
"""Seconds until a broken policy is read again."""


def run_worker(
    root: Root,
    config: WorkerConfig,
    make_engine: MakeEngine,
    stop: threading.Event,
    report: Callable[[RolloutBatch], None] | None = None,
    announce: Callable[[str], None] | None = None,
) -> int:
    """Sample until `stop` is set or num_groups are committed; returns the number of committed groups.

    report: called with each batch after it was passed to the writer. announce: called with a description of each call
    of an environment, and with "" when the call has ended. Raises SlotTakenError if a newer worker has claimed the
    slot, and TimeLimitError if an environment is not made, or returns no example, in time.
    """
    slot = new_slot() if config.slot is None else config.slot
    schedule, worker_id = Schedule.of_slot(root.run, slot), new_worker_id(slot)
    limit = TimeLimit(timeout_s=config.env_timeout_s, announce=announce)
    environments, files, code = open_code(root, limit)
    episodes = partial(episodes_of_run, root.run, timeout_s=config.episode_timeout_s, files=files)
    with (
        held_slot(root, slot, worker_id, code=to_dicts(code)) as claim,
        tempfile.TemporaryDirectory(prefix="ludic-weights-") as cache,
        RolloutWriter(root, worker_id) as writer,
        contextlib.closing(MetricsLog(root, "worker", worker_id)) as log,
    ):
        warn_of_other_code(code_before(root, claim), code, where=f"life {claim.life - 1} of slot {slot}")
        # Read after the claim: an earlier life that still runs stops at its next check of the claim.
        lives = read_earlier_lives(root, slot)
        numbers, made = schedule.missing(lives.positions), lives.groups_by_version
        num_made = 0
        check_slot = partial(check_holds_slot, root, claim)
        warn = warn_of_rows(logger, partial(find_sampling_troubles, run=root.run))
        limited_environments = {
            name: LimitedEnvironments(name, make, limit, stop) for name, make in environments.items()
        }
        follower = _PolicyFollower(root, Path(cache), make_engine, limited_environments, episodes)
        while not stop.is_set() and num_made != config.num_groups:
            waited_since = time.monotonic()
            num_groups = _wait_for_quota(follower, config, made, num_made, stop)
            if num_groups == 0:
                break
            _persist(stop, check_slot)
            sampling_since = time.monotonic()
            version = follower.version
            batch = follower.sample(list(itertools.islice(numbers, num_groups)), worker_id)
            step_s = time.monotonic() - sampling_since
            _persist(stop, check_slot)
            _persist(stop, partial(writer.append, batch))
            # Flush now: groups should be safe before the next call begins, and the trainer may wait for them.
            _persist(stop, partial(writer.flush, wait=False))
            made[version] += num_groups
            num_made += num_groups
            swap = follower.times.take(version)
            for row in call_metrics(batch, wait_s=sampling_since - waited_since, step_s=step_s, swap=swap):
                _persist(stop, partial(log.write, **row))
                warn(row)
            if report is not None:
                report(batch)
        _persist(stop, writer.flush)
    return num_made


def _persist(stop: threading.Event, write: Callable[[], None]) -> None:
    """Write, and retry while the filesystem fails; after `stop` is set, try once more and raise any error.

    An error of a writer belongs to an earlier write, which the writer retries itself; it has not taken the new data.
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
    """Wait until there are groups to sample, following the newest policy; returns their number, or 0 if stopped."""
    began, said = time.monotonic(), False
    for wait_s in _back_off(follower.num_workers):
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


def _back_off(num_workers: int = 1) -> Iterator[float]:
    """Yield growing waits. num_workers: workers that wait for the same file."""
    wait_s = max(_SHORTEST_WAIT_S, num_workers / _READS_A_SECOND)
    while True:
        yield wait_s
        wait_s = max(wait_s, min(wait_s * 1.2, _LONGEST_WAIT_S))


class _PolicyFollower:
    """Keeps an engine at the newest policy that can be loaded; never returns to a lower version."""

    def __init__(
        self,
        root: Root,
        cache: Path,
        make_engine: MakeEngine,
        environments: Mapping[str, LimitedEnvironments],
        episodes: Callable[[Agent], RunEpisode],
    ) -> None:
        self._root, self._cache, self._make_engine, self._environments = root, cache, make_engine, environments
        self.num_workers = root.run.num_workers
        self._episodes = episodes
        self._engine: Engine | None = None
        self._sampler: GroupSampler | None = None
        self.times = SwapTimes(root)
        self._complained: str | None = None
        self._refused: tuple[int | None, float] = None, 0.0
        """A version that is broken, if any, and the time (monotonic, in seconds) from which on it is read again."""

    @property
    def sampler(self) -> GroupSampler:
        assert self._sampler is not None, "follow has not found a policy yet"
        return self._sampler

    @property
    def version(self) -> int:
        assert self._engine is not None, "follow has not found a policy yet"
        return self._engine.policy_version

    def sample(self, numbers: Sequence[int], worker_id: str) -> RolloutBatch:
        """The groups of these numbers, in as few calls of the engine as there are environments."""
        for environments in self._environments.values():
            environments.restart()
        return self.sampler.sample(numbers, worker_id)

    def follow(self) -> LatestPolicy | None:
        """Load the newest policy if it is newer than the weights in use, and return it.

        A policy that is missing or half-written leaves the old weights in place and is tried again, one that is broken
        after some seconds: it may be large.
        """
        latest = None
        try:
            latest = latest_policy(self._root)
            if latest is not None and (self._sampler is None or latest.version > self.version):
                refused, until = self._refused
                if latest.version == refused and time.monotonic() < until:
                    return None
                self._load(latest.version)
        except (FileNotFoundError, ModelError, NoServerError, SchemaError, StoreError) as error:
            self._complain(error)
            if latest is not None and isinstance(error, ModelError | SchemaError):
                self._refused = latest.version, time.monotonic() + _REFUSED_S
            latest = None
        return None if self._sampler is None else latest

    def _load(self, version: int) -> None:
        try:
            with self.times.measured("fetch"):
                folder = fetch_policy(self._root, version, self._cache)
            with self.times.measured("load"):
                self._use(folder, version)
        except ModelError:
            # The local copy may be broken: the next try fetches it again.
            shutil.rmtree(self._cache, ignore_errors=True)
            raise

    def _use(self, folder: str, version: int) -> None:
        if self._engine is not None:
            self._engine.load_weights(folder, version)
            return
        run, engine = self._root.run, self._make_engine(folder, version)
        agent = Agent(engine=self.times.watch(engine), tokenizer=load_tokenizer(folder), model=run.model)
        self._sampler = GroupSampler(run=run, run_episode=self._episodes(agent), environments=self._environments)
        self._engine = engine

    def _complain(self, error: Exception) -> None:
        """Log a warning, once per error, not at every try."""
        if str(error) != self._complained:
            self._complained = str(error)
            logger.warning("waiting for a policy that can be loaded: %s", error)
