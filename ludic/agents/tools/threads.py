"""Run a blocking function beside an event loop."""

import asyncio
import contextvars
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

from ludic.user_code import only_exceptions

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Return what a blocking function returns, from a thread of its own.

    asyncio.to_thread shares few threads (6 on 2 cores): the calls of hundreds of episodes would wait for each other, a
    call that never returns would keep its thread for good, and the process could not end. Here each call has a daemon
    thread. A cancelled call is not stopped, since Python can't stop a thread; its result is dropped.
    """
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
    Thread(target=context.run, args=(work,), daemon=True, name="ludic-tool").start()
    return await future


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        with only_exceptions():
            return function(), None
    except StopIteration as error:  # a future can't hold it
        return None, RuntimeError(f"StopIteration was raised: {error}")
    except Exception as error:
        return None, error
    except BaseException as error:  # KeyboardInterrupt that the function itself raised; Ctrl-C goes to the main thread
        return None, RuntimeError(f"{type(error).__name__} was raised: {error}")
