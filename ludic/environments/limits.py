"""Time limit for calls of an environment, so that an endless loop fails one episode, not the run.

In the main thread a timer interrupts the call. This stops Python code, waiting for a socket, and C code that checks
signals, such as `re` and big integers. For other code, `announce` reports each call to a guard in another process.
"""

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ludic.environments.environment import Environment, Example, MultiAgentEnvironment, Split
from ludic.environments.single_turn_adapter import SingleTurn
from ludic.errors import Interruption, TimeLimitError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_TIMEOUTS = 3
"""Timeouts of a method in a row after which it is not called any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """Time limit of one call."""

    timeout_s: float | None = None
    """Maximum seconds of a call; None is no limit."""
    announce: Callable[[str], None] | None = None
    """Called with a description of each call when it begins, and with "" when it ends; only if there is a limit."""

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Call the function and return its result.

        Raises TimeLimitError, which names `what`, if the call takes longer than the limit. Outside the main thread, and
        if the function uses SIGALRM itself, the error is raised only when the function returns.
        """
        if self.timeout_s is None:
            return function()
        announce = self.announce or (lambda call: None)
        announce(what)
        began = time.monotonic()
        try:
            with _interrupted_after(self.timeout_s):
                answer = function()
            if time.monotonic() - began <= self.timeout_s:
                return answer
        except Interruption:
            pass
        finally:
            announce("")
        raise TimeLimitError(f"{what} did not return within {self.timeout_s:g} s; --env-timeout-s sets the limit")


NO_LIMIT = TimeLimit()


class LimitedEnvironments:
    """Factory of environments with a time limit for their constructor and their calls.

    Logs the first timeout. After MOST_TIMEOUTS of a method in a row, that method fails without being called until
    `restart`, since each call would take as long as the limit.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment | MultiAgentEnvironment],
        limit: TimeLimit,
        stop: threading.Event | None = None,
    ) -> None:
        """stop: if it is set, one timeout is enough."""
        self._name, self._make, self._limit, self._stop = name, make, limit, stop
        self._num_timeouts: Counter[str] = Counter()
        """Timeouts in a row, by method."""
        self._has_logged = False

    def __call__(self) -> "LimitedEnvironment":
        return LimitedEnvironment(self.call("its constructor", "", self._make), self.call)

    def restart(self) -> None:
        """Call every method again."""
        self._num_timeouts.clear()

    def call(self, method: str, where: str, function: Callable[[], T]) -> T:
        """Call a function of the environment and return its result. where: end of the call's name in errors.

        Raises TimeLimitError.
        """
        what = f"environment {self._name}: {method}{where}"
        num_timeouts = self._num_timeouts[method]
        if num_timeouts >= (1 if self._stop is not None and self._stop.is_set() else MOST_TIMEOUTS):
            raise TimeLimitError(f"{what} was not called, after timeouts in a row: {num_timeouts}")
        self._num_timeouts[method] = 0
        try:
            return self._limit.call(what, function)
        except TimeLimitError as error:
            self._num_timeouts[method] = num_timeouts + 1
            if not self._has_logged:
                self._has_logged = True
                logger.warning("%s; further timeouts of this environment are not logged", error)
            raise


class LimitedEnvironment:
    """Environment of any protocol whose calls have a time limit."""

    def __init__(self, environment: Any, call: Callable[[str, str, Callable[[], Any]], Any]) -> None:
        self._environment, self._call = environment, call
        self._example_id = ""
        self.max_steps: int | None = getattr(environment, "max_steps", None)
        # Only what the environment has, by which protocols tell what it is.
        if hasattr(environment, "next_agents"):
            self.next_agents = partial(self._limited, "next_agents")
        if hasattr(environment, "score_task"):
            self.score_task = partial(self._limited, "score_task")

    def example(self, index: int, split: Split) -> Example:
        return self._call("example", f" of index {index}, {split}", partial(self._environment.example, index, split))

    def reset(self, example: Example) -> Any:
        self._example_id = example.example_id
        return self._call("reset", f" on example {example.example_id!r}", partial(self._environment.reset, example))

    def step(self, action: Any) -> Any:
        return self._limited("step", action)

    def _limited(self, method: str, *args: Any) -> Any:
        called = "score" if method == "step" and isinstance(self._environment, SingleTurn) else method
        call = partial(getattr(self._environment, method), *args)
        return self._call(called, f" on example {self._example_id!r}", call)


@contextmanager
def _interrupted_after(timeout_s: float) -> Iterator[None]:
    """Raise Interruption in the block after timeout_s; only in the main thread, where Python delivers signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = [True]

    def interrupt(number: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise Interruption

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    remaining_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        try:
            yield
        finally:
            armed.clear()  # an alarm that comes later raises nothing, so that what follows is done
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining_s:
            # Restore a timer that was set around this call; it fires at once if its time has passed.
            elapsed_s = time.monotonic() - began
            signal.setitimer(signal.ITIMER_REAL, max(remaining_s - elapsed_s, 1e-6), interval_s)
