"""Wait in an event loop for code that is not ludic's: blocking functions in threads, coroutines for a limited time."""

import asyncio
import contextvars
import ctypes
from collections.abc import Callable, Coroutine
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from ludic.errors import Interruption
from ludic.user_code import only_exceptions

T = TypeVar("T")

GRACE_S = 1.0
"""Seconds that cancelled code has to release what it holds before others go on without it."""

_abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that did not end when they were cancelled; asyncio itself keeps no reference to a task."""


async def finished(coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> asyncio.Task[T] | None:
    """Run a coroutine as a task of its own, and return the task when it has ended; None if that takes longer.

    Then the task is cancelled, as it is if the caller is. One that ignores this is left behind after GRACE_S seconds,
    so that it holds nobody up.
    """
    task = asyncio.create_task(coroutine)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if done:
        return task
    _abandon(task)
    await asyncio.wait({task}, timeout=GRACE_S)
    return None


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

    def close(self) -> None:
        """End the thread after the functions that it has been given."""
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
