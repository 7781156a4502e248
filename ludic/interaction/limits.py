"""A time limit for calls of an environment: an endless loop costs one episode, not the run.

In the main thread a timer interrupts the call: Python code, waiting for a socket, and C code that looks at signals, as
`re` and big integers do. `announce` tells a guard outside of this process of each call, for what even that can't stop.
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
"""The limit where none is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """How long one call may take."""

    timeout_s: float | None = None
    """None: no limit."""
    announce: Callable[[str], None] | None = None
    """Told of each call as it begins, and "" when it is over."""

    def call(self, what: str, function: Callable[[], T]) -> T:
        """What the function returns. In the main thread, raises TimeLimitError saying `what` when it takes too long."""
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
    """An Environment whose calls end in time."""

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
    """A factory of environments whose calls, and whose making, end in time."""
    making = f"environment {name}: its constructor"
    return lambda: LimitedEnvironment(name, limit.call(making, make), limit)


class _Interruption(BaseException):
    """No Exception, so that an environment that catches those does not go on."""


def _interrupt(number: int, frame: object) -> NoReturn:
    raise _Interruption


@contextmanager
def _interrupted_after(timeout_s: float) -> Iterator[None]:
    """Raise _Interruption in the block when its time is over; Python delivers signals to the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, _interrupt)
    outer = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        try:
            # Whoever set a timer around this call still gets its alarm.
            signal.setitimer(signal.ITIMER_REAL, *outer)
        finally:
            signal.signal(signal.SIGALRM, handler)
