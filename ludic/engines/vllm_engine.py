"""Inference engine: vLLM, on the GPUs of this process or on the CPU.

Reads Hugging Face folders (safetensors), and peft's LoRA folders, whose adapters vLLM applies to the run's base. Raises
ModelError if a folder can't be used, ConfigError if a request or an option can't be served, and EngineError if vLLM's
process has died: the worker must then start again.
"""

import asyncio
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from ludic.engines.checks import check_request
from ludic.engines.engine import Completion, GenerationRequest
from ludic.engines.registry import EngineSetup
from ludic.engines.vllm_lora import Adapter, open_adapter
from ludic.engines.vllm_options import (
    check_device,
    check_installed,
    check_options,
    engine_arguments,
    set_cpu_variables,
    set_variables,
)
from ludic.engines.vllm_params import to_completion, to_vllm_params
from ludic.engines.vllm_process import VllmProcess
from ludic.errors import HalfLoadedError, ModelError, one_line
from ludic.installed import package_of
from ludic.models.adapters import base_of_adapter
from ludic.models.architecture import check_folder, eos_token_ids, load_config, load_generation_config
from ludic.records import WeightSpan

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, CompletionOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What vLLM gave for a request."""

    output: "CompletionOutput"
    adapter: Adapter | None
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
        set_variables()  # before vLLM is imported, which reads some
        self.name = package_of("vllm") or "vllm"
        self.policy_version = version
        self.max_batch: int = setup.config.max_batch
        self._adapter = open_adapter(folder, version) if base_of_adapter(folder) else None
        model = _model_of(folder, setup)
        self._config = load_config(model)
        self._vocab_size: int = self._config.get_text_config().vocab_size
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
        self._process.wait(self._process.llm.update_weight_version(str(version)))
        if self._adapter is not None:
            self._process.wait(self._add(self._adapter))

    def close(self) -> None:
        """End vLLM's process. Without this call, it ends with the engine, at the latest with this process."""
        self._process.close()

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, vocab_size=self._vocab_size, max_length=self.max_length)
        # Converted here, so that the event loop of vLLM does no more than it must.
        params = _to_params(request, self._eos_token_ids, self._vocab_size)
        prompt = request.prompt_tokens.tolist()
        sampled = await asyncio.wrap_future(self._process.submit(self._generate(prompt, params)))
        return _to_completion(request, sampled)

    async def _generate(self, prompt: list[int], params: "SamplingParams") -> _Sampled:
        """Return the whole output; runs in the event loop of vLLM."""
        async with self._replacing:  # else vLLM would give it a prefix that the older weights have computed
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

    async def _add(self, adapter: Adapter) -> None:
        """Load an adapter; vLLM forgets the one that was used least recently if it has too many."""
        try:
            await self._process.llm.add_lora(adapter.request())
        except Exception as error:  # its type is lost between the processes
            raise ModelError(f"{adapter.folder}: vLLM can't use the LoRA adapter: {one_line(error)}") from error

    async def _replace(self, folder: str, version: int) -> None:
        """Change the weights between two steps; if that fails, `generate` raises until a later one succeeds."""
        llm = self._process.llm
        async with self._replacing:
            try:
                await llm.pause_generation(mode="keep", clear_cache=False)
                await llm.collective_rpc("ludic_reload_weights", kwargs={"weights_path": folder})
                await llm.update_weight_version(str(version))
            except Exception as error:  # its type is lost between the processes
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
    model: str, config: PretrainedConfig, setup: EngineSetup, adapter: Adapter | None
) -> "AsyncEngineArgs":
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    check_device(setup.device, on_cpu=on_cpu)
    check_options(setup.config.engine_options, AsyncEngineArgs)
    if on_cpu:
        set_cpu_variables(setup.config.tensor_parallel, num_threads=torch.get_num_threads())
    arguments = engine_arguments(model, config, setup, on_cpu=on_cpu)
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


def _to_completion(request: GenerationRequest, sampled: _Sampled) -> Completion:
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
        finish_reason=output.finish_reason,
        weight_versions=spans,
        first_token_s=sampled.first_token_s,
    )
