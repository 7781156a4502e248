"""Time limit for calls of an environment, so that an endless loop fails one episode, not the run.

In the main thread a timer interrupts the call. This stops Python code, waiting for a socket, and C code that checks
signals, such as `re` and big integers. For other code, `announce` reports each call to a guard in another process.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

from ludic.environments.environment import Environment, Example, Split, Transition
from ludic.environments.single_turn import SingleTurn
from ludic.errors import TimeLimitError
from ludic.records import Message

T = TypeVar("T")

ENV_TIMEOUT_S = 60.0
"""Default limit in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """Time limit of one call."""

    timeout_s: float | None = None
    """Maximum seconds of a call; None is no limit."""
    announce: Callable[[str], None] | None = None
    """Called with a description of each call when it begins, and with "" when it ends; only if there is a limit."""

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Call the function and return its result.

        In the main thread, raises TimeLimitError, which names `what`, if the call takes longer than the limit.
        """
        if self.timeout_s is None:
            return function()
        announce = self.announce or (lambda call: None)
        announce(what)
        try:
            with _interrupted_after(self.timeout_s):
                return function()
        except _Interruption:
            raise TimeLimitError(
                f"{what} did not return within {self.timeout_s:g} s; --env-timeout-s sets the limit"
            ) from None
        finally:
            announce("")


class LimitedEnvironment:
    """Environment whose calls have a time limit."""

    def __init__(self, name: str, environment: Environment, limit: TimeLimit) -> None:
        self._name, self._environment, self._limit = name, environment, limit
        self._example_id = ""

    def example(self, index: int, split: Split) -> Example:
        return self._call("example", f"of index {index}, {split}", partial(self._environment.example, index, split))

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._example_id = example.example_id
        return self._call("reset", f"on example {example.example_id!r}", partial(self._environment.reset, example))

    def step(self, action: str) -> Transition:
        called = "score" if isinstance(self._environment, SingleTurn) else "step"
        return self._call(called, f"on example {self._example_id!r}", partial(self._environment.step, action))

    def _call(self, called: str, where: str, function: Callable[[], T]) -> T:
        return self._limit.call(f"environment {self._name}: {called} {where}", function)


def limited(name: str, make: Callable[[], Environment], limit: TimeLimit) -> Callable[[], Environment]:
    """Return a factory of environments with a time limit for their constructor and their calls."""
    making = f"environment {name}: its constructor"
    return lambda: LimitedEnvironment(name, limit.call(making, make), limit)


class _Interruption(BaseException):
    """Timer interrupt; not an Exception, so that an environment that catches Exception does not continue."""


def _interrupt(number: int, frame: object) -> NoReturn:
    raise _Interruption


@contextmanager
def _interrupted_after(timeout_s: float) -> Iterator[None]:
    """Raise _Interruption in the block after timeout_s; only in the main thread, where Python delivers signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, _interrupt)
    outer = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        try:
            # Restore a timer that was set around this call.
            signal.setitimer(signal.ITIMER_REAL, *outer)
        finally:
            signal.signal(signal.SIGALRM, handler)
