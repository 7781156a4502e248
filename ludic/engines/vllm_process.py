"""vLLM's AsyncLLM in an event loop of its own, in a thread, so that it can be used from any thread and event loop.

The model runs in a child process, which ends with this one. Raises ConfigError if vLLM refuses its arguments,
ModelError if it can't load the model, and EngineError if the process has died.
"""

import asyncio
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from ludic.errors import ConfigError, EngineError, ModelError, one_line

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

_T = TypeVar("_T")
_POLL_S = 1.0
_LONGEST_END_S = 10.0


class VllmProcess:
    """A started AsyncLLM. It ends with this object, at the latest with this process."""

    def __init__(self, make_arguments: Callable[[], "AsyncEngineArgs"], model: str) -> None:
        """Start vLLM and wait until it is ready. model: folder of the weights, for error messages."""
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="ludic-vllm", daemon=True)
        thread.start()
        try:
            self.llm: AsyncLLM = self.submit(_start(make_arguments, model)).result()
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        self.close = weakref.finalize(self, _stop, self.llm, self._loop, thread)
        """Function that ends vLLM."""

    @property
    def is_dead(self) -> bool:
        return self.llm.errored

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Start a coroutine in vLLM's event loop."""
        if self._loop.is_closed():
            coroutine.close()
            raise EngineError("the engine was closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in vLLM's event loop and return its result. Raises EngineError if vLLM's process dies."""
        future = self.submit(coroutine)
        while True:
            try:
                return future.result(timeout=_POLL_S)
            except Exception as error:
                if self.is_dead:  # calls that a dead process has not answered wait for ever
                    future.cancel()
                    raise self.died() from error
                if future.done():
                    raise

    def translate(self, error: Exception) -> Exception:
        """Return ludic's error for one of vLLM's that ended a request."""
        from vllm.exceptions import VLLMClientError

        if self.is_dead:
            return self.died()
        if isinstance(error, VLLMClientError):
            return ConfigError(f"vLLM refuses the request: {one_line(error)}")
        return EngineError(f"vLLM could not serve a request: {error.__cause__ or error}")

    def died(self) -> EngineError:
        return EngineError("vLLM's process has died; the log above says why; start the worker again")


async def _start(make_arguments: Callable[[], "AsyncEngineArgs"], model: str) -> "AsyncLLM":
    with warnings.catch_warnings(action="ignore"):  # vLLM's own imports warn
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = make_arguments()
        try:
            config = arguments.create_engine_config()
        except ValueError as error:  # pydantic's too
            raise ConfigError(f"vLLM refuses its options: {one_line(error)}") from error
        try:
            return AsyncLLM.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
        except Exception as error:  # vLLM's process logs its own
            raise ModelError(f"{model}: vLLM could not start ({one_line(error)}); the log above says why") from error


def _stop(llm: "AsyncLLM", loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the tasks of vLLM's event loop, its process and the thread."""
    if threading.current_thread() is thread:  # the garbage collector runs in any thread
        llm.shutdown()
        loop.stop()
        return
    # First the tasks, one of which would log the end of the process as an error.
    asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(_LONGEST_END_S)
    llm.shutdown()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_LONGEST_END_S)
    loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
