"""Sample with vLLM in a child process, on the GPUs that this process may use or on the CPU.

Reads Hugging Face folders (safetensors), and peft's LoRA folders, whose adapters vLLM applies to the run's base. Raises
ModelError if a folder can't be used, ConfigError if a request or an option can't be served, and EngineError if vLLM's
process has died: the worker must then start again.
"""

import asyncio
import json
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PretrainedConfig

from ludic.base import package_of
from ludic.engines.engine import Completion, GenerationRequest, check_keeps_experts, check_request
from ludic.engines.registry import EngineSetup
from ludic.engines.vllm_options import (
    check_installed,
    set_variables,
    start_arguments,
    to_completion,
    to_experts,
    to_vllm_params,
)
from ludic.errors import ConfigError, EngineError, HalfLoadedError, ModelError, one_line
from ludic.models import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    base_of_adapter,
    check_folder,
    check_served,
    eos_token_ids,
    load_config,
    load_generation_config,
    read_shapes,
    routing_of,
)
from ludic.records import Routing, WeightSpan

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, CompletionOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(frozen=True, slots=True)
class _Sampled:
    """vLLM's output for a request."""

    output: "CompletionOutput"
    adapter: "Adapter | None"
    """The adapter that sampled it."""
    first_token_s: float | None
    """Seconds until its first token; None if it was not measured."""


class VllmEngine:
    """vLLM in a child process; see ludic.engines.engine.Engine for the contract.

    Requests share the key-value cache of a common beginning of their prompts, under the same version of the weights. A
    request that vLLM has taken, but not begun, when the weights change may use such a prefix of the version before.

    In a run that publishes LoRA adapters, each version is an adapter with its own name, and requests being generated
    keep theirs: their completions have one span.
    """

    def __init__(self, folder: str, *, version: int = 0, setup: EngineSetup | None = None) -> None:
        """Start vLLM with the weights of a Hugging Face folder, or with a LoRA folder and its base."""
        setup = setup or EngineSetup()
        check_installed()
        set_variables()  # before the import of vLLM, which reads some of them
        self.name = package_of("vllm") or "vllm"
        self.policy_version = version
        self.max_batch: int = setup.config.max_batch
        self._adapter = open_adapter(folder, version) if base_of_adapter(folder) else None
        model = _model_of(folder, setup)
        self._config = load_config(model)
        self._vocab_size: int = self._config.get_text_config().vocab_size
        self._routing = routing_of(self._config, folder) if setup.keep_experts else None
        self._eos_token_ids = eos_token_ids(self._config, load_generation_config(model))
        if self._adapter is None:
            check_folder(folder, self._config)
        self._half_loaded: str | None = None
        """Folder whose weights have replaced only a part of those in use."""
        self._numbers = count()
        self._running: set[asyncio.Task[Any]] = set()
        """Tasks of requests that vLLM has; belongs to the event loop of vLLM."""
        self._replacing = asyncio.Lock()
        """Held while weights replace others; belongs to the event loop of vLLM."""
        self._timed_version = -1
        """Version whose first request was measured; belongs to the event loop of vLLM."""
        self._loading = threading.Lock()
        """Serializes changes of the weights."""
        self._process = VllmProcess(partial(_make_arguments, model, self._config, setup, self._adapter), model)
        # In float32 on the CPU, as tests/engines tries; in bfloat16, sums of another order round to other logits.
        self.repeats_in_any_batch: bool = self._process.llm.vllm_config.device_config.device_type == "cpu"
        self.max_length: int = self._process.llm.model_config.max_model_len
        check_served(self._config, setup.longrope, self.max_length, "vLLM has taken")
        self._process.wait(self._process.llm.update_weight_version(str(version)))
        if self._adapter is not None:
            self._process.wait(self._add(self._adapter))

    def close(self) -> None:
        """End vLLM's process. Without this call, it ends with the engine, at the latest with this process."""
        self._process.close()

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, vocab_size=self._vocab_size, max_length=self.max_length)
        check_keeps_experts(request, self.name, is_kept=self._routing is not None)
        # Converted here, to keep the event loop of vLLM free.
        params = _to_params(request, self._eos_token_ids, self._vocab_size)
        prompt = request.prompt_tokens.tolist()
        sampled = await asyncio.wrap_future(self._process.submit(self._generate(prompt, params)))
        return _to_completion(request, sampled, self._routing)

    async def _generate(self, prompt: list[int], params: "SamplingParams") -> _Sampled:
        """Return the whole output; runs in the event loop of vLLM."""
        async with self._replacing:  # else vLLM could reuse a prefix computed with the older weights
            self._check_usable()
        is_timed = self._time_first_of_version(params)
        began, first_s = time.monotonic(), None
        adapter, task = self._adapter, asyncio.current_task()
        assert task is not None
        self._running.add(task)
        # The salt keeps a prompt from a prefix that older weights have computed. Clearing vLLM's cache instead would
        # make it compute the cache of the requests being generated again.
        inputs: Any = {"type": "token", "prompt_token_ids": prompt, "cache_salt": str(self.policy_version)}
        lora = None if adapter is None else adapter.request()
        try:
            async for output in self._process.llm.generate(inputs, params, str(next(self._numbers)), lora_request=lora):
                found = output.outputs[0]
                if is_timed and first_s is None:
                    first_s = time.monotonic() - began
        except asyncio.CancelledError:
            self._check_usable()  # `_replace` cancels too
            raise
        except Exception as error:
            raise self._process.translate(error) from error
        finally:
            self._running.discard(task)
        return _Sampled(found, adapter, first_s)

    def _time_first_of_version(self, params: "SamplingParams") -> bool:
        """Let vLLM give an output for each token of a version's first request; for all requests it would cost time."""
        from vllm.sampling_params import RequestOutputKind

        if self._timed_version == self.policy_version:
            return False
        self._timed_version = self.policy_version
        params.output_kind = RequestOutputKind.CUMULATIVE
        return True

    def _check_usable(self) -> None:
        if self._half_loaded:
            raise HalfLoadedError(self._half_loaded)

    def load_weights(self, folder: str, version: int) -> None:
        with self._loading:
            is_adapter = base_of_adapter(folder) is not None
            if is_adapter != (self._adapter is not None):
                found, used = ("a LoRA adapter", "whole weights") if is_adapter else ("whole weights", "a LoRA adapter")
                raise ModelError(f"{folder}: it holds {found}, vLLM was started with {used}; start the worker again")
            if self._adapter is not None:
                adapter = open_adapter(folder, version)
                adapter.check_like(self._adapter)
                self._process.wait(self._add(adapter))
                self._adapter, self.policy_version = adapter, version
            else:
                check_folder(folder, self._config)
                self._process.wait(self._replace(str(Path(folder).absolute()), version))

    async def _add(self, adapter: "Adapter") -> None:
        """Load an adapter; vLLM forgets the one that was used least recently if it has too many."""
        try:
            await self._process.llm.add_lora(adapter.request())
        except Exception as error:  # the error's type is lost between the processes
            raise ModelError(f"{adapter.folder}: vLLM can't use the LoRA adapter: {one_line(error)}") from error

    async def _replace(self, folder: str, version: int) -> None:
        """Change the weights between two steps; if that fails, `generate` raises until a later one succeeds."""
        llm = self._process.llm
        async with self._replacing:
            try:
                await llm.pause_generation(mode="keep", clear_cache=False)
                await llm.collective_rpc("ludic_reload_weights", kwargs={"weights_path": folder})
                await llm.update_weight_version(str(version))
            except Exception as error:  # the error's type is lost between the processes
                self._half_loaded = folder
                # They end before vLLM goes on: a step with weights that are half loaded would end it.
                for task in self._running:
                    task.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)
                raise ModelError(f"{folder}: reading its weights failed half-way ({one_line(error)})") from error
            else:
                self._half_loaded, self.policy_version = None, version
            finally:
                if not self._process.is_dead:
                    await llm.resume_generation()


def make_engine(folder: str, *, version: int, setup: EngineSetup) -> VllmEngine:
    """Return a worker's engine with the weights of a Hugging Face folder."""
    return VllmEngine(folder, version=version, setup=setup)


def _model_of(folder: str, setup: EngineSetup) -> str:
    """Return the folder or id of the model: the folder itself, or the base of its LoRA adapter."""
    base = base_of_adapter(folder)
    if base is None:
        return str(Path(folder).absolute())
    return setup.base() if setup.base is not None else base


def _make_arguments(
    model: str, config: PretrainedConfig, setup: EngineSetup, adapter: "Adapter | None"
) -> "AsyncEngineArgs":
    from vllm import AsyncEngineArgs

    arguments = start_arguments(model, config, setup)
    if adapter is not None:
        # Requests being generated keep the adapter of the version before.
        arguments |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": adapter.max_rank}
    return AsyncEngineArgs(**arguments)


def _to_params(request: GenerationRequest, eos: tuple[int, ...], vocab_size: int) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = to_vllm_params(request, eos, vocab_size)
    # Flat logprobs are one list instead of a dictionary a token; nothing else has the object, so no copy is needed.
    return SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True, skip_clone=True)


def _to_completion(request: GenerationRequest, sampled: _Sampled, routing: Routing | None) -> Completion:
    output, adapter = sampled.output, sampled.adapter
    tokens, found = output.token_ids, output.logprobs
    if adapter is None:
        spans = [WeightSpan(version=int(s.version), start=s.start, end=s.end) for s in output.weight_versions or ()]
    else:
        spans = [WeightSpan(version=adapter.version, start=0, end=len(tokens))]
    assert found is not None, "to_vllm_params asks for them"
    # Each token's logprobs begin with its own; the most likely tokens follow, if they were asked for.
    starts, ends = found.start_indices, found.end_indices
    return to_completion(
        request,
        tokens=tokens,
        logprobs=[found.logprobs[start] for start in starts],
        candidates=[
            (found.token_ids[start:end], found.logprobs[start:end]) for start, end in zip(starts, ends, strict=True)
        ]
        if request.params.wants_kept_tokens
        else None,
        experts=to_experts(output.routed_experts, routing) if routing and request.params.return_experts else None,
        finish_reason=output.finish_reason,
        weight_versions=spans,
        first_token_s=sampled.first_token_s,
    )


# --- LoRA adapters ---------------------------------------------------------------------------------------
# vLLM applies them by one name and number for each version.
#
# Reads peft's adapter_config.json and the header of adapter_model.safetensors. Raises ModelError, which names the
# folder.

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA folder."""

    folder: str
    version: int
    """Version of the policy."""
    rank: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor, by name."""

    @property
    def max_rank(self) -> int:
        """The lowest max_lora_rank that holds the adapter."""
        fitting = [rank for rank in _RANKS if rank >= self.rank]
        if not fitting:
            raise ModelError(f"{self.folder}: the LoRA adapter has rank {self.rank}, vLLM holds at most {_RANKS[-1]}")
        return fitting[0]

    def request(self) -> "LoRARequest":
        """Return vLLM's name of the adapter."""
        from vllm.lora.request import LoRARequest

        # Numbers of adapters begin at 1, versions at 0.
        return LoRARequest(f"version-{self.version}", self.version + 1, self.folder)

    def check_like(self, other: "Adapter") -> None:
        """Raise ModelError unless this adapter has the tensors of another one."""
        names = sorted(
            name for name in self.shapes.keys() | other.shapes.keys() if self.shapes.get(name) != other.shapes.get(name)
        )
        if names:
            raise ModelError(
                f"{self.folder}: the LoRA adapter has other tensors than version {other.version}; "
                f"the first of {len(names)}: {names[0]}"
            )


def open_adapter(folder: str, version: int) -> Adapter:
    """Return the adapter of a LoRA folder, whose files are complete."""
    path = Path(folder).absolute()
    try:
        rank = int(json.loads((path / ADAPTER_CONFIG).read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: {ADAPTER_CONFIG} gives no rank: {one_line(error)}") from error
    return Adapter(folder=str(path), version=version, rank=rank, shapes=read_shapes(path / ADAPTER_WEIGHTS))


# --- vLLM's process --------------------------------------------------------------------------------------
# vLLM's AsyncLLM in an event loop of its own, in a thread, so that it can be used from any thread and event loop.
#
# The model runs in a child process, which ends with this one. Raises ConfigError if vLLM refuses its arguments,
# ModelError if it can't load the model, and EngineError if the process has died.

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
        # At the end of this process multiprocessing waits for its children. What weakref.finalize calls may come later.
        self.close = Finalize(self, _stop, (self.llm, self._loop, thread), exitpriority=0)
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
                if self.is_dead:  # calls that a dead process has not answered would hang
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
