"""Create torchao's AdamW with 8-bit moments, and convert its moments for checkpoints.

Moments of a weight matrix are codes, uint8, and one float32 scale for each block of 256 codes (Dettmers et al. 2022,
arXiv 2110.02861). Small tensors keep moments in float32. A checkpoint holds two tensors for each 8-bit moment,
NAME.codes with the weight's shape and NAME.scale, so that a resume is bit-identical. If a resumed optimizer holds a
moment in the other form (another number of ranks, or another optimizer), the moment is converted. Raises ConfigError if
torchao is missing.
"""

import importlib
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ludic.errors import ConfigError

BLOCK = 256
"""Number of moments that share a scale."""
_FEWEST = 4096
"""Minimum weights of a rank for 8-bit moments, as in torchao."""
CODES, SCALE = ".codes", ".scale"


def adamw_8bit(groups: Iterable[Mapping[str, Any]], **options: Any) -> Optimizer:
    """Return torchao's optimizer. groups, options: those of torch.optim.AdamW. Raises ConfigError without torchao."""
    base: Any = _torchao().AdamW8bit

    class AdamW8bit(base):
        """Chooses the form of moments per weight, so that all ranks use the same one; torchao chooses by rank."""

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            if is_quantized(p):
                return super()._new_buffer(p, signed)
            return torch.zeros_like(p)

    return AdamW8bit(groups, block_size=BLOCK, **options)


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.optim")
    except ImportError as error:
        raise ConfigError(
            f"optimizer is adamw_8bit, and torchao can't be imported ({error}); install it (pip install "
            "'ludic-rl[8bit]'), or set optimizer to adamw"
        ) from error


def is_quantized(weight: Tensor) -> bool:
    """Return whether the moments of a weight take 8 bits: every rank's shard must consist of whole blocks."""
    rows, num_shards = (weight.shape[0] if weight.ndim else 1), 1
    if isinstance(weight, DTensor):
        num_shards = weight.device_mesh.size()
    row = weight.numel() // max(1, rows)
    of_shard = -(-rows // num_shards)  # FSDP2 shards the first dimension as torch.chunk does
    last = rows - of_shard * (num_shards - 1)
    return last * row >= _FEWEST and of_shard * row % BLOCK == 0 and last * row % BLOCK == 0


def split_moments(moments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's tensors, with each 8-bit tensor replaced by NAME.codes and NAME.scale.

    Both have the weight's shape and sharding; scales, float32, are repeated for each code.
    """
    found: dict[str, Any] = {}
    for name, tensor in moments.items():
        local = _local(tensor)
        if not hasattr(local, "codes"):
            found[name] = tensor
            continue
        scales = local.scale.repeat_interleave(BLOCK).view(local.codes.shape)
        for suffix, part in ((CODES, local.codes), (SCALE, scales)):
            found[name + suffix] = _like(part, tensor)
    return found


def _like(local: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(whole, DTensor):
        return local
    options: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    return DTensor.from_local(local, whole.device_mesh, whole.placements, **options)


def set_quantized(moments: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
    """Copy codes and scales, as `split_moments` returns them, into an optimizer's tensors in 8 bits, in place."""
    for name, tensor in moments.items():
        if name + CODES in parts:
            codes, scales = (_local(parts[name + suffix]) for suffix in (CODES, SCALE))
            _local(tensor).codes.copy_(codes)
            _local(tensor).scale.copy_(scales.flatten()[::BLOCK])


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- Whole tensors, in files -------------------------------------------------------------------------------------


def to_file(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors of `split_moments` in the form of files: one scale for each block."""
    return {name: t.flatten()[::BLOCK].clone() if name.endswith(SCALE) else t for name, t in moments.items()}


def from_file(stored: MutableMapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Return a file's tensors as whole tensors of `split_moments`, in the form that these names imply.

    Raises ConfigError if a moment must be converted and torchao is not installed.
    """
    found = {name: _repeated(stored, name) if name.endswith(SCALE) else t for name, t in stored.items()}
    for name in wanted:
        base = name.removesuffix(CODES)
        if name.endswith(CODES) and base in found:
            found |= _quantized(base, found.pop(base))
        elif name + CODES in found:
            found[name] = _dequantized(name, found.pop(name + CODES), found.pop(name + SCALE))
    return found


def _repeated(stored: Mapping[str, Tensor], name: str) -> Tensor:
    codes = stored.get(name.removesuffix(SCALE) + CODES)
    repeated = stored[name].repeat_interleave(BLOCK)
    # Otherwise the caller reports that the shape is not the weight's.
    return repeated.view(codes.shape) if codes is not None and codes.numel() == repeated.numel() else repeated


def _empty(name: str, shape: Iterable[int]) -> Any:
    """Return zeros in 8 bits. The squared gradients' average is never negative, so its codes have no sign."""
    subclass = importlib.import_module(f"{_torchao().__name__}.subclass_8bit").OptimState8bit
    return subclass.zeros(tuple(shape), signed=not name.endswith("exp_avg_sq"), block_size=BLOCK)


def _quantized(name: str, tensor: Tensor) -> dict[str, Tensor]:
    empty = _empty(name, tensor.shape)
    empty.copy_(tensor)
    return split_moments({name: empty})


def _dequantized(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    empty = _empty(name, codes.shape)
    set_quantized({name: empty}, {name + CODES: codes, name + SCALE: scales})
    return empty.dequantize()
