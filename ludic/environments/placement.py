"""Decide where the blocking methods of an environment run, by `run_in` of its class or by their measured time.

"auto", the default, begins in the thread of the event loop, where a call delays all episodes. The time of each call
beyond QUICK_S is added to a balance of its method, at most COUNTED_S per call; a quicker call subtracts its difference
to QUICK_S. A balance above MOST_HELD_UP_S moves the environment, from its next episode on: calls of 50 ms do so at the
third call, calls of 5 ms at the 34th, and one slow call among quick ones, such as a first import, never does.

An episode never moves once begun. So the first episodes begin one by one, until a call was quick, the environment has
moved, or PROBE_S have passed without a call.

After the move each episode has a thread, in which its environment is created and called. Some calls take turns there:

- Methods that compute. Python computes in one thread at a time, so many computing methods at once would starve the
  event loop and the engine; one does not. A method counts as computing if a slow call of it was busy for more than half
  of its time, until a slow call is busy for less than a tenth.
- The calls of an environment with a question and a score, which all episodes share. It has one thread, since it may not
  be safe to call it concurrently, and moves between two calls.

Questions that only ludic's own scorers score move to processes instead (ludic.environments.single_turn). They compute,
and keep no state between calls, which is unknown for users' code.

Three things keep an environment in the event loop: an alarm that it sets (`signal.alarm` works in the main thread
only), a call that computed until its time limit (only the main thread can interrupt code in C), and, once it has moved,
an error that mentions threads, such as that of a signal or of an SQLite connection.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from ludic.environments.environment import RUN_IN
from ludic.environments.single_turn import SingleTurn
from ludic.errors import Interruption

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUICK_S = 0.002
"""Seconds of a call that do not noticeably delay other episodes."""
COUNTED_S = 0.05
"""Maximum seconds of one call that count."""
MOST_HELD_UP_S = 0.1
"""Total seconds beyond QUICK_S per call for which a method may delay the event loop."""
PROBE_S = 5.0
"""Seconds for which other episodes wait for the first call of one."""
AUTO = RUN_IN[0]
CONSTRUCTOR = "its constructor"
_BEFORE_ACTIONS = (CONSTRUCTOR, "reset", "next_agents")
"""Calls whose time does not predict that of calls after an action."""


class Placement:
    """Where the blocking methods of an environment run, for all its episodes in this process."""

    def __init__(self, name: str, run_in: str) -> None:
        """run_in: of the class, one of RUN_IN."""
        self.where = "loop"
        """Place of the next episode: "loop", "thread" or "process", to which only ludic's own scorers move."""
        self.is_auto = True
        """True if the times of calls can change the place."""
        self._name = name
        self.is_shared = self._has_processes = False
        self._held_up_s: dict[str, float] = {}
        """Balance of each method."""
        self._stays_since: str | None = None
        """Why the environment must stay in the event loop."""
        self._is_decided = self._was_slow = False
        """True if episodes may begin side by side, and True if a call after an action was slow before."""
        self._probe: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        """The end of the episode that runs alone."""
        self._computing: set[str] = set()
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._pin(run_in)

    @property
    def shares_thread(self) -> bool:
        """True if one thread serves all episodes."""
        return self.is_auto and self.is_shared and self.where == "thread"

    def learn(self, environment: Any) -> None:
        """Learn from a created environment, since a function that creates it does not say where it runs."""
        self.is_shared = isinstance(environment, SingleTurn)
        self._has_processes = isinstance(environment, SingleTurn) and environment.has_processes
        if self.is_shared:
            self._decide()
        if self.is_auto:
            self._pin(getattr(environment, "run_in", AUTO))

    def _pin(self, run_in: Any) -> None:
        if run_in in RUN_IN and run_in != AUTO:
            # With "process", a coroutine of this thread waits for the process.
            self.where, self.is_auto = "thread" if run_in == "thread" else "loop", False

    async def begin(self) -> None:
        """Wait until an episode may begin; the first one runs alone, until `end`."""
        loop = asyncio.get_running_loop()
        while self.is_auto and not (self.is_shared or self._is_decided):
            if self._probe is None or self._probe[0] is not loop:
                self._probe = loop, asyncio.Event()
                return
            try:
                await asyncio.wait_for(self._probe[1].wait(), PROBE_S)
            except TimeoutError:
                self._is_decided = not self._was_slow

    def end(self) -> None:
        """Let the next episode begin."""
        if self._probe is not None:
            self._probe[1].set()
            self._probe = None

    def _decide(self) -> None:
        self._is_decided = True
        self.end()

    def call(self, method: str, function: Callable[[], T]) -> T:
        """Return the result of a function, and count its time in this thread."""
        if not self.is_auto:
            return function()
        began, busy_began = time.monotonic(), time.thread_time()
        is_interrupted = is_awaited = False
        try:
            result = function()
            is_awaited = inspect.isawaitable(result)
            return result
        except Interruption:
            is_interrupted = True
            raise
        finally:
            seconds, busy_s = time.monotonic() - began, time.thread_time() - busy_began
            if is_interrupted and busy_s > seconds / 2:
                self.stay(f"{method} computed until its time limit, and only the main thread can interrupt code in C")
            # Only other programs, or threads of this one, can make the call of a coroutine slow.
            self._count(method, 0.0 if is_awaited else seconds, busy_s)

    def stay(self, reason: str) -> None:
        """Never move the environment. reason: for people to read."""
        self._stays_since = self._stays_since or reason

    def stay_for_alarms(self) -> None:
        """Never move the environment, since it sets alarms."""
        self.stay("it sets alarms, which only the main thread can")

    def turn(self, method: str) -> AbstractAsyncContextManager[Any]:
        """Return a context for a call in a thread; methods that compute run one at a time."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        return self._turn[1] if method in self._computing else nullcontext()

    def note(self, what: str, error: Exception) -> None:
        """Bring the environment back if a call failed since it ran in a thread. what: name of the call."""
        if self.is_auto and self.where == "thread" and "thread" in str(error).lower():
            self.where, self.is_auto = "loop", False
            logger.warning(
                "%s failed in a thread: %s; its next episodes run in the event loop, and delay the others. Correct "
                "it, or write run_in = 'loop' in the class",
                *(what, error),
            )

    def _count(self, method: str, seconds: float, busy_s: float) -> None:
        """Count a call. busy_s: the part of its seconds in which its thread computed."""
        if seconds > QUICK_S and busy_s > seconds / 2:
            self._computing.add(method)
        elif seconds > QUICK_S and busy_s < seconds / 10:
            self._computing.discard(method)
        if self.where != "loop" or not self.is_auto:
            return
        if method not in _BEFORE_ACTIONS:
            self._was_slow = seconds > QUICK_S
            if not self._was_slow:
                self._decide()
        held_up_s = self._held_up_s.get(method, 0.0) + min(seconds, COUNTED_S) - QUICK_S
        self._held_up_s[method] = max(held_up_s, 0.0)
        if held_up_s > MOST_HELD_UP_S:
            self._decide()
            self._move(method, seconds)

    def _move(self, method: str, seconds: float) -> None:
        what = (
            f"environment {self._name}: {method} took {1000 * seconds:.0f} ms, during which all other episodes stopped"
        )
        if self._stays_since is not None:
            self.is_auto = False
            logger.info("%s. It stays there: %s", what, self._stays_since)
            return
        self.where = "process" if self._has_processes else "thread"
        place = "has a thread of its own"
        if self.is_shared:
            place = "is scored in a process" if self._has_processes else "is scored in a thread, one after the other"
        advice = "run_in = 'loop', in the class or among the options of questions, keeps them here"
        if self.is_shared and not self._has_processes:
            advice += ", 'thread' scores many at once, which the scorer must be safe for"
        logger.info("%s. From now on each new episode %s; %s", what, place, advice)
