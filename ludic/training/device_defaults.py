"""Choose the settings that follow the device: the values of `dtype`, `compile` and others of ON_CPU that are None.

The trainer resolves them once, at its start, and records the result in attempts/N.json. So a later trainer, also on
another device, uses the same values. On the CPU the values are those of ON_CPU.

On CUDA, the tokens of a micro-batch and of a chunk of logits are the maximum whose memory, as estimated by
ludic.training.memory, fits into the free memory at the trainer's start. `ludic plan` chooses by the same function.
Imports no store.
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from ludic.base import MEMORY_VARIABLE, is_main, num_ranks, run_on_main
from ludic.run import RunConfig
from ludic.training.config import ON_CPU, TrainConfig, describe_computing
from ludic.training.memory import (
    LOGIT,
    Activations,
    activations,
    longest_sequence,
    model_sizes,
    rank_memory,
    reference_place,
)

logger = logging.getLogger(__name__)

USABLE = 0.9
"""Share of a GPU's memory that is planned for; the rest is for fragments, NCCL and cuBLAS. vLLM's own default, too."""
_CHUNKS_SHARE = 0.125
"""Share of the memory not used by the state that a chunk of logits may take."""
_STEP = 1024
"""Both numbers of tokens are multiples of this, and at least this."""
_LARGEST_CHUNK = 8192
"""At 8,192 rows the head's products take ten times as long as adding its gradient to memory (Qwen3-8B, H100)."""
_LARGEST_MICRO_BATCH = 65_536
"""Maximum tokens of a pass; more do not make a GPU faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Facts about a rank's GPU that settings depend on."""

    free: int
    """Bytes that the rank may take."""
    has_bfloat16: bool = True
    has_triton: bool = True
    """True if layers can be compiled."""


def follow_device(
    config: TrainConfig, run: RunConfig, load_model_config: Callable[[], PreTrainedConfig], mesh: DeviceMesh
) -> TrainConfig:
    """Return the settings with a value for each that follows the device; every rank must call it, and gets the same.

    load_model_config: called on rank 0, on CUDA only. Raises ModelError as it does, and if transformers can't make the
    model.
    """
    missing = _missing(config)
    if not missing:
        return config
    if mesh.device_type == "cpu":
        return _on_cpu(config)
    free = torch.tensor(_memory_to_use())
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    config = config.replace(**run_on_main(lambda: _chosen(config, run, load_model_config(), int(free))))
    if is_main():
        words = describe_computing(config.flat())
        logger.info("this trainer computes in %s (chosen for the GPU: %s)", words, ", ".join(missing))
    return config


def with_defaults(
    config: TrainConfig, run: RunConfig, model: PreTrainedConfig, gpu: Gpu | None, *, ranks: int
) -> TrainConfig:
    """Return the settings with a value for each that follows the device.

    model: configuration of the run's model. gpu: of each rank; None is the CPU. Raises ModelError if transformers can't
    make the model.
    """
    missing = _missing(config)
    if not missing:
        return config
    if gpu is None:
        return _on_cpu(config)
    kernels = {
        "dtype": "bfloat16" if gpu.has_bfloat16 else "float32",
        "tf32": True,
        "activation_checkpointing": True,
        "compile": gpu.has_triton,
        "fused_adamw": True,
        "balance_by": "cost",
    }
    config = config.replace(**{name: kernels[name] for name in missing if name in kernels})
    memory = _Memory(config, run, model, ranks)
    if config.model.logprob_chunk_tokens is None:
        room = USABLE * gpu.free - memory.state
        chunk = _CHUNKS_SHARE * room / (LOGIT * memory.sizes.vocab_size)
        config = config.replace(logprob_chunk_tokens=max(_STEP, min(_LARGEST_CHUNK, int(chunk) // _STEP * _STEP)))
    if config.batch.max_tokens_per_micro_batch is None:
        memory = _Memory(config, run, model, ranks)
        config = config.replace(max_tokens_per_micro_batch=memory.most_tokens(USABLE * gpu.free))
    return config


def _missing(config: TrainConfig) -> list[str]:
    given = config.flat()
    return [name for name in ON_CPU if given[name] is None]


def _on_cpu(config: TrainConfig) -> TrainConfig:
    return config.replace(**{name: ON_CPU[name] for name in _missing(config)})


class _Memory:
    """Memory of a rank's GPU with these settings, by the tokens of a micro-batch."""

    def __init__(self, config: TrainConfig, run: RunConfig, model: PreTrainedConfig, ranks: int) -> None:
        self._config, self._run, self._model, self._ranks = config, run, model, ranks
        self.sizes = model_sizes(model, config.model)

    @property
    def state(self) -> int:
        """Bytes apart from the passes of a micro-batch."""
        return self._total(Activations(kept=0, more=0))

    def of(self, num_tokens: int) -> int:
        """Return the bytes at the peak of a step."""
        return self._total(
            activations(
                self._model,
                self._config.model,
                num_tokens=num_tokens,
                length=longest_sequence(self._model, self._run, self._config),
                device="cuda",
                float32_head=self._run.float32_head,
            )
        )

    def most_tokens(self, limit: float) -> int:
        """Return the maximum tokens that fit; the minimum if none do. Takes about five passes on the meta device."""
        low, high = _STEP, _LARGEST_MICRO_BATCH
        at_high = self.of(high)
        if at_high <= limit:
            return high
        at_low = self.of(low)
        if at_low > limit:
            return low
        while high - low > _STEP:
            # Memory is piecewise linear and convex in the tokens, so a chord finds tokens that fit.
            share = (limit - at_low) / (at_high - at_low)
            tokens = low + int(share * (high - low)) // _STEP * _STEP
            tokens = min(max(tokens, low + _STEP), high - _STEP)
            needed = self.of(tokens)
            if needed <= limit:
                low, at_low = tokens, needed
            else:
                high, at_high = tokens, needed
        return low

    def _total(self, passes: Activations) -> int:
        reference = reference_place(self._run, self._config)
        parts = rank_memory(self.sizes, passes, self._config, ranks=self._ranks, device="cuda", reference=reference)
        return sum(parts.values())


def _chosen(config: TrainConfig, run: RunConfig, model: PreTrainedConfig, free: int) -> dict[str, Any]:
    """Return values for the settings that are None, by the abilities of the GPU and the installed packages."""
    gpu = Gpu(
        free=free,
        has_bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
        has_triton=importlib.util.find_spec("triton") is not None,
    )
    missing = _missing(config)
    config = with_defaults(config, run, model, gpu, ranks=num_ranks())
    tokens = config.batch.max_tokens_per_micro_batch
    assert tokens is not None
    needed = _Memory(config, run, model, num_ranks()).of(tokens)
    if needed > USABLE * free:
        logger.warning(
            "%.1f GB of a GPU are free, and training takes about %.1f GB with micro-batches of %d tokens; use more "
            "ranks, --optimizer adamw_8bit or --lora-rank",
            *(free / 1e9, needed / 1e9, tokens),
        )
    chosen = config.flat()
    return {name: chosen[name] for name in missing}


def _memory_to_use() -> int:
    """Return the bytes of this rank's GPU that the trainer may take: those free now, or its share of all."""
    free, total = torch.cuda.mem_get_info()
    return min(free, int(total * float(os.environ.get(MEMORY_VARIABLE, "1"))))
