"""Run episodes in an event loop that ends even if a tool ignores its cancellation."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ludic.settings import GRACE_S, DaemonThreads


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in an event loop of its own, as asyncio.run does; raises what it raises.

    asyncio.run waits for all tasks and threads, so one tool that ignores its cancellation would hang the worker. Here
    the remaining tasks have GRACE_S seconds to end; tasks that do not end never run again, since their event loop is
    closed. Functions in asyncio.to_thread continue in a daemon thread.

    Also works inside a running event loop, such as a notebook's, which it blocks. A thread is no alternative: time
    limits use signals, which reach only the main thread.
    """
    # With a factory, the runner keeps the thread's own event loop, which the notebook needs.
    with outside_of_loops(), asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.get_loop().set_default_executor(DaemonThreads())
        try:
            runner.run(main)
        finally:
            runner.run(_end_tasks())


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, stubborn = await asyncio.wait(left, timeout=GRACE_S)
        for task in stubborn:
            asyncio.tasks._unregister_task(task)  # Python's hook for registering tasks


# --- Calls of which some are coroutines ------------------------------------------------------------------


def call_all(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return the result of each call. If one raises, the coroutines of earlier calls are closed."""
    found: list[Any] = []
    try:
        for call in calls:
            found.append(call())
    except BaseException:
        for each in filter(inspect.iscoroutine, found):
            each.close()
        raise
    return found


async def wait_all(found: Sequence[Any]) -> list[Any]:
    """Return the values, those of coroutines once all have ended. Raises the error of the first one that failed."""
    waiting = [each for each in found if inspect.isawaitable(each)]
    # Late failures occur within this call, not after it.
    results = iter(await asyncio.gather(*waiting, return_exceptions=True))
    ended = [next(results) if inspect.isawaitable(each) else each for each in found]
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return ended


@contextmanager
def outside_of_loops() -> Iterator[None]:
    """Let this thread forget the loop and the task that run in it, for as long as the block runs.

    asyncio documents these calls for custom event loops and tasks.
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
