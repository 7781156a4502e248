"""The rollout worker: follow the newest policy, sample its quota of groups, append them.

Reads policies/, writes rollouts/ and metrics/. It shares nothing with the trainer but the root, so
it may start first, die, or be joined by others. On SIGTERM what was sampled is flushed; on SIGKILL
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, ModelError, SchemaError, StoreError
from ludic.inference.chat import load_tokenizer
from ludic.inference.engine import Engine
from ludic.interaction.single_step import Agent
from ludic.records import Rollout, RolloutBatch
from ludic.rollouts.sampler import GroupSampler
from ludic.rollouts.schedule import Schedule, new_slot, new_worker_id, read_earlier_lives
from ludic.store import LatestPolicy, MetricsLog, RolloutWriter, Root, fetch_policy, latest_policy

logger = logging.getLogger(__name__)

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

    def __post_init__(self) -> None:
        if self.groups_per_call < 1:
            raise ConfigError(f"groups_per_call is {self.groups_per_call}, wanted at least 1")
        if self.num_groups is not None and self.num_groups < 1:
            raise ConfigError(f"num_groups is {self.num_groups}, wanted at least 1, or nothing for no end")


def run_worker(
    root: Root,
    config: WorkerConfig,
    make_engine: MakeEngine,
    stop: threading.Event,
    report: Callable[[RolloutBatch], None] | None = None,
) -> int:
    """Sample until `stop` is set or num_groups are committed; returns the groups committed.

    `report` is told of each batch after it was handed to the writer.
    """
    slot = new_slot() if config.slot is None else config.slot
    worker_id = new_worker_id(slot)
    schedule, lives = Schedule.of_slot(root.run, slot), read_earlier_lives(root, slot)
    numbers = schedule.missing(lives.positions)
    made = lives.groups_by_version
    num_made = 0
    with (
        tempfile.TemporaryDirectory(prefix="ludic-weights-") as cache,
        RolloutWriter(root, worker_id) as writer,
        contextlib.closing(MetricsLog(root, "worker", worker_id)) as log,
    ):
        follower = _PolicyFollower(root, Path(cache), make_engine)
        while not stop.is_set() and num_made != config.num_groups:
            waited_since = time.monotonic()
            num_groups = _wait_for_quota(follower, config, made, num_made, stop)
            if num_groups == 0:
                break
            sampling_since = time.monotonic()
            version = follower.version
            batch = follower.sampler.sample(list(itertools.islice(numbers, num_groups)), worker_id)
            step_s = time.monotonic() - sampling_since
            _persist(stop, partial(writer.append, batch))
            # Not later: what is sampled should be safe before the next call begins, and the trainer may wait for it.
            _persist(stop, partial(writer.flush, wait=False))
            made[version] += num_groups
            num_made += num_groups
            for row in _metrics(batch, wait_s=sampling_since - waited_since, step_s=step_s):
                _persist(stop, partial(log.write, **row))
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
    for wait_s in _back_off():
        latest = follower.follow()
        if latest is not None:
            quota = latest.groups_per_worker - made[follower.version] if config.follow_quota else config.groups_per_call
            remaining = quota if config.num_groups is None else min(quota, config.num_groups - num_made)
            if remaining > 0:
                return min(remaining, config.groups_per_call)
        if stop.wait(wait_s):
            break
    return 0


def _back_off() -> Iterator[float]:
    wait_s = _SHORTEST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(wait_s * 1.2, _LONGEST_WAIT_S)


class _PolicyFollower:
    """Keeps an engine on the newest policy that can be loaded; never goes back to a lower version."""

    def __init__(self, root: Root, cache: Path, make_engine: MakeEngine) -> None:
        self._root, self._cache, self._make_engine = root, cache, make_engine
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
            self._sampler = GroupSampler.of_run(self._root.run, agent)
        else:
            self._sampler.agent.engine.load_weights(folder, version)

    def _complain(self, error: Exception) -> None:
        """Once a policy, not at every look."""
        if str(error) != self._complained:
            self._complained = str(error)
            logger.warning("waiting for a policy that can be loaded: %s", error)


def _metrics(batch: RolloutBatch, *, wait_s: float, step_s: float) -> Iterator[dict[str, Any]]:
    """One metrics row an environment, so that rewards of different scales are not mixed."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for env_name in sorted({rollout.env_name for rollout in rollouts}):
        mine = [rollout for rollout in rollouts if rollout.env_name == env_name]
        num_tokens = sum(rollout.action_length for rollout in mine)
        yield {
            "worker_id": batch.metadata.worker_id,
            "env_name": env_name,
            "policy_version": mine[0].policy_version,
            "num_rollouts": len(mine),
            "num_groups": len({rollout.group_id for rollout in mine}),
            "num_tokens": num_tokens,
            "reward_mean": mean_reward(mine),
            "response_length_mean": sum(rollout.response_length for rollout in mine) / len(mine),
            "num_truncated": sum(rollout.truncated for rollout in mine),
            "num_parse_errors": sum(rollout.parse_error for rollout in mine),
            "num_errors": sum(rollout.error is not None for rollout in mine),
            "step_s": step_s,
            "wait_s": wait_s,
            "tokens_per_s": num_tokens / step_s,
        }


def mean_reward(rollouts: Sequence[Rollout]) -> float | None:
    """Over the scored ones; None when none was."""
    rewards = [rollout.episode_reward for rollout in rollouts if rollout.episode_reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
