"""Run episodes in an event loop that ends even if a tool ignores that it was cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from ludic.environments.nested_loop import outside_of_loops
from ludic.waits import GRACE_S, DaemonThreads


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in an event loop of its own, as asyncio.run does; raises what it raises.

    asyncio.run waits for all tasks and threads, so one tool that ignores its cancellation would hang the worker. Here
    the tasks that are left have GRACE_S seconds to end; those that don't never run again, since their event loop is
    closed. What asyncio.to_thread runs goes on in a daemon thread.

    Also works inside a running event loop, as of a notebook, which it blocks. A thread would not do: time limits work
    by signals, which reach only the main thread.
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
            asyncio.tasks._unregister_task(task)  # the hook by which Python lets others keep their own list of tasks
