"""Define the request of an episode, its limits, and the errors by which it fails. One request is one episode."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import cycle, product
from types import MappingProxyType, TracebackType
from typing import Any

from ludic.base import MAX_OBSERVATION_CHARACTERS
from ludic.engines import SamplingParams
from ludic.environments import Example
from ludic.errors import ConfigError, EngineError, ModelError, ScorerError
from ludic.records import Purpose
from ludic.settings import as_error, failure_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """Request for one episode of one example."""

    env_name: str
    example: Example
    params: SamplingParams
    seed: int
    group_id: str
    group_index: int = 0
    group_size: int = 1
    request_index: int
    """Position of the episode in the run's schedule."""
    purpose: Purpose = "train"
    example_columns: str | None = None
    """Columns of the example that its rollouts store, as JSON text; None stores none."""
    error: str | None = None
    """Error if the environment gave no example; the episode fails with it, and `example` is empty."""
    traceback: str | None = None
    """Traceback of the environment's code, with `error`."""


def repeat(request: EpisodeRequest, n: int, seed: int) -> tuple[EpisodeRequest, ...]:
    """Return the requests of a group: the same example n times, each with its own seed.

    request_index counts up from the one of `request`.
    """
    return tuple(
        replace(
            request,
            group_index=index,
            group_size=n,
            request_index=request.request_index + index,
            seed=derive_seed(seed, index),
        )
        for index in range(n)
    )


def sweep(requests: Sequence[EpisodeRequest], settings: Mapping[str, Sequence[Any]]) -> tuple[EpisodeRequest, ...]:
    """Return the requests with sampling settings in turn: each combination of the values of all settings.

    settings: fields of SamplingParams. Seeds stay as they are. Raises ConfigError for a value out of range.
    """
    if not settings:
        return tuple(requests)
    combinations = cycle([dict(zip(settings, values, strict=True)) for values in product(*settings.values())])
    return tuple(
        replace(request, params=replace(request.params, **values))
        for request, values in zip(requests, combinations, strict=False)
    )


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits from integers: the same on every machine, and unrelated for neighbouring integers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


# --- Limits ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode."""

    max_steps: int | None = None
    """Maximum steps of each agent in the environment; None takes the environment's own, else MAX_STEPS."""
    max_seq_len: int | None = None
    """Maximum tokens of prompt and completion together; None is the engine's."""
    max_observation_characters: int | None = MAX_OBSERVATION_CHARACTERS
    """Maximum characters of an observation; the rest is cut. None is no limit."""
    max_tool_rounds: int = 16
    """Maximum completions with tool calls before one step of the environment."""
    max_tool_calls: int = 16
    """Maximum tool calls of one completion that are run; the others get an error."""
    accept_incomplete: bool = False
    """Pass a completion that reached max_tokens on, instead of refusing it."""
    timeout_s: float | None = None
    """Maximum seconds of an episode; None is no limit."""
    max_depth: int = 1
    """Maximum depth of delegation: number of agents above one that works on a task."""
    max_children: int = 8
    """Maximum delegated tasks in an episode."""
    max_child_tokens: int | None = None
    """Maximum tokens that are sampled for all of these tasks; None is no limit."""


class Ending:
    """Lets the starter of an episode end it early."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Reason why the episode was ended early; None if it was not."""
        self._limit: asyncio.Timeout | None = None

    def end(self, reason: str) -> None:
        """End the episode, which stores its rows so far, with an error. reason: the error."""
        self.reason = reason
        self._expire()

    def watch(self, limit: asyncio.Timeout | None) -> None:
        """Let the limit end the episode, at once if `end` was called already. None: the episode is over."""
        self._limit = limit
        if self.reason is not None:
            self._expire()

    def _expire(self) -> None:
        if self._limit is not None:
            with suppress(RuntimeError):  # the episode is about to end
                self._limit.reschedule(asyncio.get_running_loop().time())


ending: ContextVar[Ending | None] = ContextVar("ending", default=None)
"""The Ending of the episode that begins in this context."""


class TokenBudget:
    """Tokens that several agents share, which may sample at the same time."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    def reserve(self, wanted: int) -> int:
        """Return at most `wanted` tokens, at least one. Raises LimitReachedError if none is left."""
        if self.num_left <= 0:
            raise LimitReachedError("budget", "the tokens for tasks that are handed on are used up or reserved")
        granted = min(wanted, self.num_left)
        self.num_left -= granted
        return granted

    def give_back(self, unused: int) -> None:
        """Give back tokens that were reserved and not sampled."""
        self.num_left += unused


# --- Failures --------------------------------------------------------------------------------------------
# Errors of code that is not ludic's fail one episode and never the worker.

ENGINE_ERRORS = (ModelError, ConfigError, EngineError)
"""Errors of an engine, which end the worker; agents do not read them, and they do not fail an episode."""


NO_COMPONENTS: Mapping[str, float] = MappingProxyType({})


class EpisodeFailedError(Exception):
    """An environment, a parser or a context raised an error, or returned a value that can't be stored; the text names
    it."""

    def __init__(
        self, error: str, traceback: str | None = None, components: Mapping[str, float] = NO_COMPONENTS
    ) -> None:
        """error, traceback: columns of the rows; see ludic.settings.user_code.CodeFailure. components: of
        ScorerError."""
        super().__init__(error)
        self.traceback, self.components = traceback, components


class LimitReachedError(Exception):
    """A limit ends the episode."""

    def __init__(self, reason: str, message: str) -> None:
        """reason: truncation reason of the rows."""
        super().__init__(message)
        self.reason = reason


class fails_the_episode:  # noqa: N801
    """Raise EpisodeFailedError for errors of the block, see `as_error` and `failure_of`.

    An episode enters about ten of these contexts, and a generator would cost three times as much.
    """

    __slots__ = ("_passing",)

    def __init__(self, unless: tuple[type[Exception], ...] = ()) -> None:
        """unless: errors that pass as they are, besides EpisodeFailedError and LimitReachedError."""
        self._passing = (EpisodeFailedError, LimitReachedError, *unless)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = None if error is None else as_error(error, in_coroutine=True)
        if failure is not None and not isinstance(failure, self._passing):
            found = failure_of(failure)
            components = failure.components if isinstance(failure, ScorerError) else NO_COMPONENTS
            raise EpisodeFailedError(found.error, found.traceback, components) from failure
