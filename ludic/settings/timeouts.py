"""Wait in an event loop for code that is not ludic's: blocking functions in threads, coroutines for a limited time.

The time in which a call waits for its turn, since others have used up a number of requests (`RequestLimit`), does not
count, nor does the time in which a call of another one blocks the event loop (`blocking`).
"""

import asyncio
import contextvars
import ctypes
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from ludic.errors import Interruption
from ludic.settings.user_code import only_exceptions

T = TypeVar("T")

GRACE_S = 1.0
"""Seconds that cancelled code has to release what it holds before others go on without it."""

_CLOCK_S = 0.001
"""Seconds that count as none: a timer comes early by as much as the clock of an event loop is coarse."""

Running = Callable[[], AbstractContextManager[Any]]
"""Makes a context that is entered while the time of a call counts."""

_abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that did not end when they were cancelled; asyncio itself keeps no reference to a task."""


async def finished(
    coroutine: Coroutine[Any, Any, T], timeout_s: float | None, running: Running = nullcontext
) -> asyncio.Task[T] | None:
    """Run a coroutine as a task of its own, and return the task when it has ended; None if that takes longer.

    Then the task is cancelled, as it is if the caller is. One that ignores this is left behind after GRACE_S seconds,
    so that it holds nobody up. running: entered while the time counts.
    """
    clock = _Clock(timeout_s, running)
    token = _clock.set(clock)
    task = asyncio.create_task(coroutine)
    _clock.reset(token)
    try:
        ends: list[asyncio.Future[Any]] = [task, clock.is_over]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    finally:
        clock.close()
    if task.done():
        return task
    _abandon(task)
    await asyncio.wait({task}, timeout=GRACE_S)
    return None


_blocked_s = 0.0
"""Seconds in which `blocking` calls have held up the event loops of this process."""


@contextmanager
def blocking() -> Iterator[None]:
    """Count the time of the block, in which no coroutine goes on, for none of those that wait.

    Only if an event loop runs in this thread: a block within another one, or in a thread beside, holds up no more.
    """
    global _blocked_s
    if asyncio._get_running_loop() is None:
        yield
        return
    began = time.monotonic()
    try:
        yield
    finally:
        _blocked_s += time.monotonic() - began


class _Clock:
    """Time limit of a call, which is suspended while the call only waits for its turn."""

    def __init__(self, timeout_s: float | None, running: Running) -> None:
        self._loop = asyncio.get_running_loop()
        self.is_over: asyncio.Future[None] = self._loop.create_future()
        self._left_s, self._running = timeout_s, running
        self._num_waiting = self._num_in_turn = 0
        self._stop: ExitStack | None = None
        self._run()

    def is_in_loop(self) -> bool:
        """Whether it belongs to the event loop that runs: a thread or a nested loop may inherit that of another."""
        return self._loop is asyncio.get_running_loop()

    def count(self, *, waiting: int = 0, in_turn: int = 0) -> None:
        """Count requests of the call that begin or end to wait for their turn, or to have it."""
        self._num_waiting += waiting
        self._num_in_turn += in_turn
        is_suspended = self._num_waiting > 0 and self._num_in_turn == 0
        if self.is_over.done() or is_suspended == (self._stop is None):
            return
        if is_suspended:
            self._suspend()
        else:
            self._run()

    def close(self) -> None:
        self._suspend()
        self.is_over.cancel()

    def _run(self) -> None:
        self._stop = ExitStack()
        self._stop.enter_context(self._running())
        if self._left_s is not None:
            self._stop.callback(self._subtract, self._loop.time() - _blocked_s)
            self._stop.callback(self._loop.call_later(self._left_s, self._end).cancel)

    def _suspend(self) -> None:
        if self._stop is not None:
            self._stop.close()
            self._stop = None

    def _subtract(self, since: float) -> None:
        assert self._left_s is not None
        self._left_s -= self._loop.time() - _blocked_s - since

    def _end(self) -> None:
        self._suspend()
        assert self._left_s is not None
        if self._left_s > _CLOCK_S:  # others have blocked the event loop
            self._run()
        elif not self.is_over.done():
            self.is_over.set_result(None)


_clock: ContextVar[_Clock | None] = ContextVar("clock", default=None)
"""Clock of the call that runs."""


class RequestLimit:
    """A limit of requests at a time, of one event loop: the others wait for their turn, in order."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._free = asyncio.Semaphore(most)

    @asynccontextmanager
    async def turn(self, prepare: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the block. Meanwhile the time limit of the call is suspended.

        prepare: awaited as part of the wait, when the turn has come.
        """
        clock = _clock.get()
        if clock is not None and not clock.is_in_loop():
            clock = None
        is_suspended = clock is not None and (self._free.locked() or prepare is not None)
        if clock is not None and is_suspended:
            clock.count(waiting=1)
        try:
            await self._free.acquire()
            if prepare is not None:
                await self._prepare(prepare)
        finally:
            if clock is not None and is_suspended:
                clock.count(waiting=-1)
        if clock is not None:
            clock.count(in_turn=1)
        try:
            yield
        finally:
            if clock is not None:
                clock.count(in_turn=-1)
            self._free.release()

    async def _prepare(self, prepare: Callable[[], Awaitable[None]]) -> None:
        try:
            await prepare()
        except BaseException:
            self._free.release()
            raise


def _abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task and keep it until it ends; its error is read, since asyncio logs unread errors."""
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()


async def in_thread(function: Callable[[], T]) -> T:
    """Return what a blocking function returns, from a thread of its own."""
    thread = SideThread()
    try:
        return await thread.run(function)
    finally:
        thread.close()


class SideThread:
    """A thread beside the event loop, which runs blocking functions one after the other.

    asyncio.to_thread shares few threads (6 on 2 cores): the calls of hundreds of episodes would wait for each other, a
    call that never returns would keep its thread for good, and the process could not end. This thread is a daemon, and
    starts with its first function.
    """

    def __init__(self) -> None:
        self._functions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_busy = False

    async def run(self, function: Callable[[], T]) -> T:
        """Return what a function returns. If this is cancelled, the function goes on, and its result is dropped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():  # cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            result, error = _outcome(function)
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(settle, result, error)

        context = contextvars.copy_context()
        self._functions.put(lambda: context.run(work))
        if self._thread is None:
            self._thread = Thread(target=self._work, daemon=True, name="ludic-side")
            self._thread.start()
        return await future

    def close(self, last: Callable[[], None] | None = None) -> None:
        """End the thread after the functions that it has been given. last: runs at the end, if any function has."""
        if last is not None:
            self._functions.put(last)
        self._functions.put(None)

    def interrupt(self) -> None:
        """End the thread; raise Interruption in what it runs: in Python code at once, in other code when it returns."""
        if self._is_busy and self._thread is not None and self._thread.ident is not None:
            thread_id = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(Interruption))
        self.close()

    def _work(self) -> None:
        with suppress(Interruption):
            while (function := self._functions.get()) is not None:
                self._is_busy = True
                function()
                self._is_busy = False


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        with only_exceptions():
            return function(), None
    except StopIteration as error:  # a future can't hold it
        return None, RuntimeError(f"StopIteration was raised: {error}")
    except Exception as error:
        return None, error
    except BaseException as error:  # what `only_exceptions` lets pass; Ctrl-C itself goes to the main thread
        return None, RuntimeError(f"{type(error).__name__} was raised: {error}")


class DaemonThreads(ThreadPoolExecutor):
    """Executor of an event loop, as of asyncio.to_thread: each function runs in a daemon thread of its own.

    So functions that never return take no thread from the others, and hold up neither the loop's end nor the process's.
    """

    def submit(self, function: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            try:
                result = function(*args, **options)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        future.set_running_or_notify_cancel()
        Thread(target=work, daemon=True, name="ludic-executor").start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no thread down: those that still run are daemons."""


class SideLoop:
    """An event loop in a thread beside, for coroutines that code without an event loop waits for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True, name="ludic-side-loop")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Return what a coroutine returns. Raises TimeoutError, and cancels it, if that takes longer."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if future.done():  # the coroutine's own
                raise
            future.cancel()
            raise TimeoutError(f"no result within {timeout_s:g} s") from None

    def close(self) -> None:
        """Cancel what still runs, and end the thread, unless a coroutine blocks it; then the daemon thread is left."""
        with suppress(FutureTimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(2 * GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=GRACE_S)
