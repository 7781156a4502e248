"""Call the methods of environments within time limits, in the place that ludic.environments.placement chooses.

An endless loop fails one episode, not the run. In the main thread a timer interrupts a call: Python code, a wait for a
socket, and C code that checks signals, such as `re` and big integers. A coroutine is cancelled. In an episode's own
thread, Python code is interrupted, and other code is abandoned. For code that holds Python's lock, `announce` reports
each call to a guard in another process. Raises TimeLimitError at a limit.
"""

import asyncio
import inspect
import logging
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ludic.environments.environment import RUN_IN, Environment, Example, MultiAgentEnvironment, Split
from ludic.environments.event_loops import outside_of_loops
from ludic.environments.placement import CONSTRUCTOR, Placement
from ludic.environments.single_turn import SingleTurn
from ludic.errors import ConfigError, Interruption, NotCalledError, TimeLimitError
from ludic.settings import GRACE_S, SideThread, blocking, finished, only_exceptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_TIMEOUTS = 3
"""Consecutive timeouts of a method after which it is no longer called."""
_MOST_WITHOUT_EXAMPLE = 16
"""Maximum consecutive examples that an environment may fail to give; after more, its set-up is wrong, or it has no
examples left."""

Announce = Callable[[str], Callable[[], None]]
"""Reports that a call with a description begins; returns a function that reports its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """Time limit of one call."""

    timeout_s: float | None = None
    """Maximum seconds of a call; None is no limit."""
    announce: Announce | None = None
    """Called with a description of each call; only if there is a limit."""

    def call(self, what: str, function: Callable[[], T], on_alarm: Callable[[], None] | None = None) -> T:
        """Call the function and return its result. on_alarm: called if the function sets an alarm of its own.

        The function sees no event loop, so it can run its own, and can't cancel the task that calls it. Raises
        TimeLimitError, which names `what`, if the call takes longer than the limit. Outside the main thread, and if the
        function uses SIGALRM itself, the error is raised only when the function returns.
        """
        if self.timeout_s is None:
            with outside_of_loops(), _interrupted_after(_NEVER_S if on_alarm else None, on_alarm), only_exceptions():
                return function()
        began, interruption = time.monotonic(), None
        with self._announced(what), blocking():
            try:
                with outside_of_loops(), _interrupted_after(self.timeout_s, on_alarm), only_exceptions():
                    answer = function()
                if time.monotonic() - began <= self.timeout_s:
                    return answer
            except Interruption as raised:
                interruption = raised
        raise self._error(what) from interruption  # its traceback shows the position in the user's code

    async def wait(self, what: str, awaitable: Awaitable[T]) -> T:
        """Return the result of a coroutine, which is cancelled at the limit. Raises TimeLimitError, as `call` does.

        The limit is suspended while the coroutine waits for its turn at a judge (ludic.settings.timeouts.RequestLimit).
        """
        task = await finished(_result(awaitable), self.timeout_s, partial(self._announced, what))
        if task is None:
            raise self._error(what)
        if task.cancelled():
            raise RuntimeError(f"{what} cancelled itself")
        return task.result()

    @contextmanager
    def _announced(self, what: str) -> Iterator[None]:
        end = self.announce(what) if self.announce is not None and self.timeout_s is not None else None
        try:
            yield
        finally:
            if end is not None:
                end()

    def _error(self, what: str) -> TimeLimitError:
        return TimeLimitError(f"{what} did not return within {self.timeout_s:g} s; --env-timeout-s sets the limit")


NO_LIMIT = TimeLimit()


async def _result(awaitable: Awaitable[T]) -> T:
    # In a task, SystemExit and KeyboardInterrupt would end the whole event loop.
    with only_exceptions(in_coroutine=True):
        return await awaitable


class LimitedEnvironments:
    """Factory of environments with a time limit for their constructor and their calls.

    Logs the first timeout. After MOST_TIMEOUTS of a method in a row, that method fails without being called until
    `restart`, since each call would take as long as the limit.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment | MultiAgentEnvironment],
        limit: TimeLimit = NO_LIMIT,
        stop: threading.Event | None = None,
    ) -> None:
        """stop: if it is set, one timeout is enough."""
        self.limit = limit
        self.scores_groups = False
        """True if the last created environment has a method score_group."""
        self._name, self._make, self._stop = name, make, stop
        self.placement = Placement(name, run_in(make))
        self._lanes: list[_Lane] = []
        """The lane of an environment that all episodes share, if it has moved to a thread."""
        weakref.finalize(self, _close_all, self._lanes)
        self._num_timeouts: Counter[str] = Counter()
        """Timeouts in a row, by method."""
        self._has_logged = False
        self._num_without_example = 0
        """Consecutive examples that the environment failed to give."""

    def __call__(self) -> "HeldEnvironment":
        """Make an environment in this thread. Raises TimeLimitError, and the errors of the constructor."""
        with self.counted(CONSTRUCTOR) as what:
            return HeldEnvironment(self.call_in_this_thread(CONSTRUCTOR, what, self._make), self)

    async def open(self) -> "HeldEnvironment":
        """Make the environment of an episode, in a thread of its own if it runs in one; raises as `__call__`."""
        await self.placement.begin()
        lane = _Lane()
        try:
            if self.placement.where != "thread" or self.placement.shares_thread:
                return self()
            with self.counted(CONSTRUCTOR) as what:
                environment = await self.call_in(lane, CONSTRUCTOR, what, self._make)
            return HeldEnvironment(environment, self, lane)
        except BaseException:
            lane.thread.interrupt()
            self.placement.end()
            raise

    def call_in_this_thread(self, method: str, what: str, function: Callable[[], T]) -> T:
        """Return the result of a function, called in this thread within its limit. method, what: its name, short and
        long."""
        on_alarm = self.placement.stay_for_alarms if self.placement.is_auto else None
        # Measured within the limit, since announcing a call lets other threads run first and may take longer than the
        # call.
        return self.limit.call(what, partial(self.placement.call, method, function), on_alarm)

    async def call_in(self, lane: "_Lane", method: str, what: str, function: Callable[[], T]) -> T:
        """Return the result of a function, called in a thread within its limit. Raises TimeLimitError, and its
        errors."""
        async with self.placement.turn(method):
            try:
                return await self.limit.wait(what, lane.thread.run(partial(self.placement.call, method, function)))
            except TimeLimitError:
                raise
            except Exception as error:
                self.placement.note(what, error)
                raise

    def shared_lane(self) -> "_Lane | None":
        """Return the thread that serves all episodes; None if there is none."""
        if not self.placement.shares_thread:
            return None
        loop = asyncio.get_running_loop()
        if not self._lanes or self._lanes[0].loop is not loop:
            _close_all(self._lanes)
            self._lanes[:] = [_Lane(loop)]
        return self._lanes[0]

    def count_example(self, error: str | None = None) -> None:
        """Count an example, or the error instead. Raises ConfigError after many consecutive errors."""
        self._num_without_example = 0 if error is None else self._num_without_example + 1
        if self._num_without_example >= _MOST_WITHOUT_EXAMPLE:
            num = self._num_without_example
            raise ConfigError(f"environment {self._name} gave no example {num} times in a row; the last time: {error}")

    def restart(self) -> None:
        """Call every method again."""
        self._num_timeouts.clear()

    @contextmanager
    def counted(self, method: str, where: str = "") -> Iterator[str]:
        """Yield the name of a call, and count its timeout. where: end of the name. Raises TimeLimitError."""
        what = f"environment {self._name}: {method}{where}"
        num_timeouts = self._num_timeouts[method]
        if num_timeouts >= (1 if self._stop is not None and self._stop.is_set() else MOST_TIMEOUTS):
            raise TimeLimitError(f"{what} was not called, after timeouts in a row: {num_timeouts}")
        try:
            yield what
        except NotCalledError:
            raise
        except TimeLimitError as error:
            self._num_timeouts[method] += 1
            if not self._has_logged:
                self._has_logged = True
                logger.warning("%s; further timeouts of this environment are not logged", error)
            raise
        except Exception:
            self._num_timeouts[method] = 0
            raise
        self._num_timeouts[method] = 0


class _Lane:
    """A thread for blocking methods, of one episode or of all."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """loop: event loop of the episodes that share it; None if one episode has it."""
        self.loop, self.thread = loop, SideThread()
        self.turn = asyncio.Lock()
        """Held by the call that the thread runs; waiting for it does not count towards the limit of a call."""

    def leave(self) -> None:
        """Interrupt the call in the thread. Other episodes continue in a new thread."""
        self.thread.interrupt()
        if self.loop is not None:
            self.thread = SideThread()


def _close_all(lanes: list[_Lane]) -> None:
    for lane in lanes:
        lane.thread.close()


class HeldEnvironment:
    """The environment of one episode, with calls of its methods."""

    def __init__(self, environment: Any, limits: LimitedEnvironments, lane: _Lane | None = None) -> None:
        """lane: where it was created and its blocking methods run; None is the thread of the event loop."""
        self.environment = environment
        """The user's environment; one with a question and a score is wrapped in a SingleTurn."""
        self._limits, self._lane = limits, lane
        limits.placement.learn(environment)
        limits.scores_groups = callable(getattr(environment, "score_group", None))
        self._example_id = ""
        self._timed_out: str | None = None
        """The call that continued in the thread after its time limit."""

    def example(self, index: int, split: Split) -> Example:
        """Return an example, in this thread. Raises TimeLimitError."""
        with self._limits.counted("example", f" of index {index}, {split}") as what:
            return self._limits.limit.call(what, partial(self.environment.example, index, split))

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Return the result of a method, awaited if it is a coroutine. Raises TimeLimitError, and its errors."""
        if method in ("reset", "score_group"):
            self._example_id = args[0].example_id
        if self._limits.placement.where == "process":
            self.environment.score_in_processes()
        function = partial(getattr(self.environment, method), *args, **options)
        with self._limits.counted(self.named(method), f" on example {self._example_id!r}") as what:
            lane = self._lane or self._limits.shared_lane()
            if lane is None or (method == "reset" and isinstance(self.environment, SingleTurn)):
                result = self._limits.call_in_this_thread(self.named(method), what, function)
            else:
                result = await self._in_thread(lane, self.named(method), what, function)
            return await self._awaited(what, result)

    def named(self, method: str) -> str:
        """Return the name that a method has in the user's class: the step of a question and a score is its `score`."""
        return "score" if method == "step" and isinstance(self.environment, SingleTurn) else method

    def close(self) -> None:
        """End the thread of the episode."""
        self._limits.placement.end()
        if self._lane is not None and self._timed_out is None:
            self._lane.thread.close()

    async def _awaited(self, what: str, result: Any) -> Any:
        """Return a method's result, or the result of the coroutine that it returned."""
        if asyncio.isfuture(result) and result.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError(f"{what} returned a task of another event loop; make the method a coroutine (async def)")
        return await self._limits.limit.wait(what, result) if inspect.isawaitable(result) else result

    async def _in_thread(self, lane: _Lane, method: str, what: str, function: Callable[[], T]) -> T:
        async with lane.turn:
            if self._timed_out is not None:
                raise NotCalledError(f"{what} was not called: {self._timed_out} took too long before")
            try:
                return await self._limits.call_in(lane, method, what, function)
            except (TimeLimitError, asyncio.CancelledError):  # the latter at the end of the episode's time
                self._timed_out = what
                lane.leave()
                raise


def run_in(make: Callable[[], Any]) -> str:
    """Return where the blocking methods of a factory's environments run, as its class says: one of RUN_IN."""
    while isinstance(make, partial):
        make = make.args[0] if make.func is SingleTurn else make.func
    return getattr(make, "run_in", RUN_IN[0])


_NEVER_S = 1e7
"""Limit of a call without one, to detect whether it sets an alarm."""
_CLOCK_S = 0.5
"""Tolerance in seconds for recognizing the own timer."""


@contextmanager
def _interrupted_after(timeout_s: float | None, on_alarm: Callable[[], None] | None) -> Iterator[None]:
    """Raise Interruption in the block after timeout_s; only in the main thread, where Python delivers signals.

    It is raised again after each further GRACE_S, since a bare `except` in the code may have caught it. on_alarm:
    called if the block sets the alarm itself.
    """
    if timeout_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = [True]

    def interrupt(number: int, frame: object) -> None:
        if armed:
            raise Interruption

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    remaining_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s, GRACE_S)
    try:
        try:
            yield
        finally:
            armed.clear()  # a later alarm raises nothing, so that the following lines run
    finally:
        left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        expected_s = began + timeout_s - time.monotonic()
        if on_alarm is not None and expected_s > 0 and abs(expected_s - left_s) > _CLOCK_S:
            on_alarm()
        signal.signal(signal.SIGALRM, handler)
        if remaining_s:
            # Restore a timer that was set around this call; it fires at once if its time has passed.
            elapsed_s = time.monotonic() - began
            signal.setitimer(signal.ITIMER_REAL, max(remaining_s - elapsed_s, 1e-6), interval_s)
