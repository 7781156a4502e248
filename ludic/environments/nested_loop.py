"""Run another package's coroutine piece by piece, in this thread, also if an event loop already runs in it.

ludic calls environments from its own event loop. A second loop in the same thread runs here while the first one waits;
a second thread would not do, since time limits work by signals, which reach only the main thread.
"""

import asyncio
import atexit
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


class NestedTask:
    """A coroutine that runs only during `run_until`; between the calls it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._task = _loop().create_task(coroutine)

    def run_until(self, event: asyncio.Event) -> bool:
        """Run until the event is set, and return True; or until the coroutine ends, and return False.

        Raises what the coroutine raised.
        """
        with outside_of_loops():
            _loop().run_until_complete(self._wait(event))
        if self._task.done():
            self._task.result()
            return False
        return True

    def cancel(self) -> None:
        """Cancel the coroutine, which sees it when another one runs next."""
        if not _loop().is_closed():
            self._task.cancel()

    async def _wait(self, event: asyncio.Event) -> None:
        is_set = asyncio.ensure_future(event.wait())
        await asyncio.wait({is_set, self._task}, return_when=asyncio.FIRST_COMPLETED)
        is_set.cancel()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all nested tasks of this process: one each would hold three open files an episode."""
    loop = asyncio.new_event_loop()
    atexit.register(_close, loop)
    return loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
    loop.close()


@contextmanager
def outside_of_loops() -> Iterator[None]:
    """Let this thread forget the loop and the task that run in it, for as long as the block runs.

    asyncio documents these calls for those who write loops and tasks of their own.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
