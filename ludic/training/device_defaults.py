"""Settings that follow the device: what None means in `dtype`, `compile` and the others of ON_CPU.

The trainer resolves them once, at its start, and records the result in attempts/N.json. So a later trainer, also on
another device, goes on as it was. On the CPU the values are those of ON_CPU.

On CUDA, the tokens of a micro-batch and of a chunk of logits follow from the memory that is free when the trainer
starts. ludic.models.sizes has the formulas of a layer; `Need` adds up the rest.
"""

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ludic.devices import MEMORY_VARIABLE
from ludic.distributed import is_main, num_ranks, run_on_main
from ludic.models.first_model import first_config
from ludic.models.sizes import LayerSizes
from ludic.models.weight_files import load_config
from ludic.store import Root
from ludic.training.config import ON_CPU, TrainConfig, describe_computing

logger = logging.getLogger(__name__)

_USABLE = 0.9
"""Share of the free memory that is planned for: the rest is for NCCL, cuBLAS and fragments."""
_CHUNKS_SHARE = 0.125
"""Share of the memory beside the state that a chunk of logits may take."""
_LOGIT_BYTES = 16
"""Bytes of a logit at the peak: in the model's dtype, in float32, as softmax, and a product of these."""
_STEP = 1024
"""Both numbers of tokens are multiples of this, and at least this."""
_LARGEST_CHUNK = 8192
"""At 8,192 rows the head's products take ten times as long as adding its gradient to memory (Qwen3-8B, H100)."""
_LARGEST_MICRO_BATCH = 65_536
"""More tokens in a pass make a GPU no faster."""


def follow_device(root: Root, config: TrainConfig, mesh: DeviceMesh) -> TrainConfig:
    """Return the settings with a value for each that follows the device; every rank must call it.

    Raises ModelError if the model's configuration can't be read.
    """
    given = config.flat()
    missing = [name for name in ON_CPU if given[name] is None]
    if not missing:
        return config
    if mesh.device_type == "cpu":
        return config.replace(**{name: ON_CPU[name] for name in missing})
    chosen = run_on_main(_kernels)
    config = config.replace(**{name: chosen[name] for name in missing if name in chosen})
    free = torch.tensor(_memory_to_use())
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    sizes = run_on_main(lambda: _fitting(root, config, int(free)), dict[str, int])
    config = config.replace(**{name: sizes[name] for name in missing if name in sizes})
    if is_main():
        words = describe_computing(config.flat())
        logger.info("this trainer computes in %s (chosen for the GPU: %s)", words, ", ".join(missing))
    return config


def expected(config: TrainConfig, model: Any, *, device: str, free: int, num_ranks: int) -> TrainConfig:
    """Return the settings that `follow_device` would choose on a machine that need not be here.

    model: its configuration. device: cpu or cuda. free: bytes of a GPU that the trainer may take.
    """
    missing = [name for name, value in config.flat().items() if name in ON_CPU and value is None]
    if device == "cpu":
        return config.replace(**{name: ON_CPU[name] for name in missing})
    config = config.replace(**{name: _ON_CUDA[name] for name in missing if name in _ON_CUDA})
    chunk, tokens = Need.of(LayerSizes.of(model), config, num_ranks).fitting(free)
    sizes = {"logprob_chunk_tokens": chunk, "max_tokens_per_micro_batch": tokens}
    return config.replace(**{name: value for name, value in sizes.items() if name in missing})


_ON_CUDA: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "tf32": True,
    "activation_checkpointing": True,
    "compile": True,
    "fused_adamw": True,
    "balance_by": "cost",
}


def _kernels() -> dict[str, Any]:
    """Return what a CUDA device and the installed packages can do, as settings."""
    return {
        **_ON_CUDA,
        "dtype": "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32",
        "compile": importlib.util.find_spec("triton") is not None,
    }


def _memory_to_use() -> int:
    """Return the bytes of this rank's GPU that the trainer may take: those free now, or its share of all."""
    free, total = torch.cuda.mem_get_info()
    return min(free, int(total * float(os.environ.get(MEMORY_VARIABLE, "1"))))


def _fitting(root: Root, config: TrainConfig, free: int) -> Mapping[str, int]:
    with first_config(root) as folder:
        sizes = LayerSizes.of(load_config(str(folder)))
    need = Need.of(sizes, config, num_ranks())
    chunk, tokens = need.fitting(free)
    if need.state + need.beside(chunk) + tokens * need.token > _USABLE * free:
        logger.warning(
            "%.1f GB of a GPU are free, and training takes about %.1f GB with micro-batches of %d tokens; use more "
            "ranks, --optimizer adamw_8bit or --lora-rank",
            *(free / 1e9, (need.state + need.beside(chunk) + tokens * need.token) / 1e9, tokens),
        )
    return {"logprob_chunk_tokens": chunk, "max_tokens_per_micro_batch": tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory of one rank, in bytes."""

    state: int
    """Weights, gradients, moments, a reference, and what FSDP2 gathers at a time."""
    token: int
    """Activations of a token of the micro-batch."""
    logits: int
    """Logits of a token of a chunk."""

    @classmethod
    def of(cls, sizes: LayerSizes, config: TrainConfig, num_ranks: int) -> "Need":
        """Add up the memory; dtype and activation_checkpointing must be set."""
        word = 2 if config.model.dtype == "bfloat16" else 4
        moments = 2 if config.optimizer.optimizer == "adamw_8bit" else 8
        rank, trained = config.model.lora_rank, sizes.num_weights
        if rank is not None:  # on seven matrices of a layer
            widths = 4 * sizes.hidden + 2 * (sizes.queries + sizes.keys) + 3 * (sizes.hidden + sizes.mlp)
            trained = sizes.num_layers * rank * widths
        state = trained * (4 + 4 + moments) // num_ranks
        frozen = 0 if rank is None else sizes.num_weights
        reference = config.loss.reference is not None and rank is None and not config.loss.reference_offload
        state += (frozen + (sizes.num_weights if reference else 0)) * word // num_ranks
        # Gathered: embedding and head, the layer in use and the next one, and a gradient of the root unit in float32.
        state += (sizes.root_weights + 2 * sizes.layer_weights) * word + sizes.root_weights * (word + 4)
        kept = sizes.hidden if config.model.activation_checkpointing else sizes.layer_activations
        return cls(
            state=state,
            token=word * (sizes.num_layers * kept + sizes.layer_activations + 4 * sizes.hidden),
            logits=_LOGIT_BYTES * sizes.vocabulary,
        )

    def beside(self, chunk_tokens: int) -> int:
        """Return the bytes of a chunk of logits."""
        return chunk_tokens * self.logits

    def fitting(self, free: int) -> tuple[int, int]:
        """Return tokens of a chunk of logits and of a micro-batch that fit into `free` bytes; the least if none do."""
        room = _USABLE * free - self.state
        chunk = _rounded(_CHUNKS_SHARE * room / self.logits, _LARGEST_CHUNK)
        return chunk, _rounded((room - self.beside(chunk)) / self.token, _LARGEST_MICRO_BATCH)


def _rounded(tokens: float, largest: int) -> int:
    return max(_STEP, min(largest, int(tokens) // _STEP * _STEP))
