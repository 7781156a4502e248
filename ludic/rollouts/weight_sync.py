"""Follow the newest policy: fetch it, load it into the engine, and measure the times of both.

Reads policies/. A policy that is missing, half-written or broken leaves the weights in use unchanged, with a warning.
Raises ReplacedRootError if the root is another run.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ludic.agents import Agent
from ludic.engines import Engine, MakeEngine
from ludic.environments import LimitedEnvironments
from ludic.errors import ModelError, NoServerError, SchemaError, StoreError
from ludic.models import load_tokenizer
from ludic.rollouts.sampler import GroupSampler
from ludic.rollouts.scheduler import EngineCalls, RunEpisode
from ludic.root import LatestPolicy, Root
from ludic.root.weights import fetch_policy, latest_policy, read_policy, vocabulary_of
from ludic.run import run_of

logger = logging.getLogger(__name__)

_REFUSED_S = 10.0
"""Seconds until a broken policy is read again."""
_POLL_S = 10.0
"""Seconds between checks of run.json while there is no LATEST, which otherwise shows that the root is still the same
run."""


class WeightSync:
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
        self._episodes = episodes
        self._calls: EngineCalls | None = None
        self._sampler: GroupSampler | None = None
        self.times = SwapTimes(root)
        self._complained: str | None = None
        self._refused: tuple[int | None, float] = None, 0.0
        """A version that is broken, if any, and the time (monotonic, in seconds) from which on it is read again."""
        self._next_poll_at = time.monotonic() + _POLL_S

    @property
    def sampler(self) -> GroupSampler:
        assert self._sampler is not None, "follow has not found a policy yet"
        return self._sampler

    @property
    def calls(self) -> EngineCalls:
        """The engine."""
        assert self._calls is not None, "follow has not found a policy yet"
        return self._calls

    @property
    def version(self) -> int:
        return self.calls.policy_version

    def follow(self, quiet: Callable[[], None] = lambda: None) -> LatestPolicy | None:
        """Load the newest policy if it is newer than the weights in use, and return it; None before the first one.

        quiet: called when the weights are on this machine, before they replace those in use.

        A policy that is missing or half-written leaves the old weights in place and is tried again, one that is broken
        after some seconds: it may be large. It is returned all the same, for its budget. Raises ReplacedRootError if
        the root is another run by now.
        """
        latest = None
        try:
            latest = latest_policy(self._root)
            if latest is None and time.monotonic() >= self._next_poll_at:
                self._next_poll_at = time.monotonic() + _POLL_S
                self._root.check_same_run()
            if latest is not None and (self._sampler is None or latest.version > self.version):
                refused, until = self._refused
                if latest.version != refused or time.monotonic() >= until:
                    self._load(latest.version, quiet)
        except (FileNotFoundError, ModelError, NoServerError, SchemaError, StoreError) as error:
            self._complain(error)
            if latest is not None and isinstance(error, ModelError | SchemaError):
                self._refused = latest.version, time.monotonic() + _REFUSED_S
        return None if self._sampler is None else latest

    def _load(self, version: int, quiet: Callable[[], None]) -> None:
        try:
            with self.times.measured("fetch"):
                folder = fetch_policy(self._root, version, self._cache)
            quiet()
            with self.times.measured("load"):
                self._use(folder, version)
        except ModelError:
            # The local copy may be broken: the next try fetches it again.
            for copy in self._cache.iterdir():
                shutil.rmtree(copy, ignore_errors=True)
            raise

    def _use(self, folder: str, version: int) -> None:
        if self._calls is not None:
            self._calls.load_weights(folder, version)
            return
        run, calls = run_of(self._root), self.times.watch(self._make_engine(folder, version))
        agent = Agent(
            engine=calls,
            tokenizer=load_tokenizer(folder),
            model=run.model,
            vocab_size=vocabulary_of(self._root),
        )
        self._sampler = GroupSampler(run=run, run_episode=self._episodes(agent), environments=self._environments)
        self._calls = calls

    def _complain(self, error: Exception) -> None:
        """Log a warning, once per error, not at every try."""
        if str(error) != self._complained:
            self._complained = str(error)
            logger.warning("waiting for a policy that can be loaded: %s", error)


# --- Times of a new version ------------------------------------------------------------------------------
# From its publish to the first token that a worker samples with it.


class SwapTimes:
    """The times of a worker's newest version; reported once, with the first rollouts of the version."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._seconds: dict[str, float] = {}
        self._engine: EngineCalls | None = None

    def watch(self, engine: Engine) -> EngineCalls:
        """Return the engine to sample with: the same one, with the time of each version's first token noted."""
        self._engine = EngineCalls(engine)
        return self._engine

    @contextmanager
    def measured(self, part: Literal["fetch", "load"]) -> Iterator[None]:
        """Measure a part of a swap; a part that fails is not counted, and is measured again."""
        began = time.monotonic()
        yield
        self._seconds[f"{part}_s"] = time.monotonic() - began

    def take(self, version: int) -> dict[str, Any]:
        """Return fetch_s, load_s and first_token_s, named as in schemas/metrics.v1.json.

        Empty if taken before, or while no completion that began with the version has ended.
        """
        if self._engine is None or version not in self._engine.first_tokens:
            return {}
        seconds, self._seconds = self._seconds, {}
        return {**seconds, "first_token_s": self._since_publish(version)} if seconds else {}

    def _since_publish(self, version: int) -> float | None:
        """Return the seconds from the trainer's clock at the claim to this machine's clock at the first token."""
        first = self._engine.first_tokens.get(version) if self._engine else None
        try:
            policy = read_policy(self._root, version)
        except (SchemaError, StoreError):  # the weights are sound; only the measurement is lost
            return None
        if first is None or policy is None:
            return None
        since = first - datetime.fromisoformat(policy.created_at).timestamp()
        return since if since >= 0 else None
