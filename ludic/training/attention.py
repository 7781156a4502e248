"""Attention over packed sequences, where each sequence attends only to itself.

transformers separates packed sequences by a dense mask of all tokens by all tokens, whose cost grows with the square
of the micro-batch. ludic passes the sequences' lengths instead of a mask. The cost grows with the sum of their squared
lengths (benchmarks/packing.py).

On CUDA, half-precision models run PyTorch's variable-length attention, one kernel for all sequences. Otherwise causal
attention, which needs no mask, runs on one sequence after the other. Lengths stay on the CPU, so no layer waits for the
device.
"""

# Shapes: T = packed tokens, S = sequences, H = heads, K = key and value heads, D = head size.

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "ludic_packed"
"""attn_implementation of models that ludic trains; without lengths it is transformers' sdpa."""


_FLASH_CAPABILITY = (8, 0)
"""Lowest compute capability that the variable-length kernel runs on: Ampere."""


def packed_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the arguments that tell a decoder how long its packed sequences are; make them once per micro-batch.

    attention_mask is (1, 1, 1, S) int64 on the CPU: transformers passes a 4-D mask on to the layers unchanged.
    """
    arguments = {"attention_mask": torch.tensor(lengths)[None, None, None]}
    return arguments | (flash_arguments(lengths, device) if device.type == "cuda" else {})


def flash_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the arguments by which transformers passes packed lengths to flash attention.

    cu_seq_lens_*: (S + 1,) int32, the sequences' starts and the end of the last.
    """
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    starts_and_longest = {"cu_seq_lens": starts, "max_length": max(lengths)}
    return {f"{name}_{of}": value for name, value in starts_and_longest.items() for of in ("q", "k")}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers; returns (1, T, H, D). query: (1, H, T, D). key, value: (1, K, T, D)."""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    if cu_seq_lens_q is not None and max_length_q is not None and _has_kernel(query, value):
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        output = varlen_attn(
            query,
            key,
            value,
            cu_seq_q=cu_seq_lens_q,
            cu_seq_k=cu_seq_lens_q,
            max_q=max_length_q,
            max_k=max_length_q,
            scale=scaling,
            # Tokens before the token itself: all (-1), or one fewer than sliding_window, which counts it.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(output, Tensor)  # a pair only if asked for
        return output[None], None
    lengths = attention_mask.flatten().tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [_attend(*part, scaling=scaling, sliding_window=sliding_window) for part in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether the variable-length kernel computes this attention on this device."""
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None) -> Tensor:
    """Causal attention of one sequence: a token sees itself and sliding_window - 1 tokens before it; None is all."""
    length = query.shape[2]
    window = None
    if sliding_window is not None and length > sliding_window:
        positions = torch.arange(length, device=query.device)
        distances = positions[:, None] - positions
        window = (distances >= 0) & (distances < sliding_window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=window,
        is_causal=window is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def keep_uncompiled() -> None:
    """Exclude `packed_attention` from torch.compile: it depends on lengths, which differ in every micro-batch."""
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
