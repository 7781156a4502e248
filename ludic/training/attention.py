"""Attention over packed sequences, where each sequence attends only to itself.

transformers separates packed sequences by a dense mask of all tokens by all tokens, whose cost grows with the square
of the micro-batch. ludic passes the sequences' lengths instead of a mask, and runs PyTorch's causal attention, which
needs no mask, on one sequence after the other. The cost grows with the sum of their squared lengths
(benchmarks/packing.py).
"""

# Shapes: T = packed tokens, S = sequences, H = heads, K = key and value heads, D = head size.

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "ludic_packed"
"""attn_implementation of models that ludic trains; without lengths it is transformers' sdpa."""


def sequence_lengths(position_ids: Tensor) -> Tensor:
    """Return (1, 1, 1, S) int64 lengths, to pass as attention_mask: transformers does not change a 4-D mask.

    position_ids: (1, T), restarting at 0 at each sequence.
    """
    starts = (position_ids[0] == 0).nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([position_ids.shape[1]])])
    return (ends - starts)[None, None, None]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers; returns (1, T, H, D). query: (1, H, T, D). key, value: (1, K, T, D)."""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    lengths = attention_mask.flatten().tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [_attend(*part, scaling=scaling, sliding_window=sliding_window) for part in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, sliding_window: int | None) -> Tensor:
    """Causal attention of one sequence: a token sees itself and sliding_window - 1 tokens before it; None is all."""
    length = query.shape[2]
    window = None
    if sliding_window is not None and length > sliding_window:
        places = torch.arange(length, device=query.device)
        distances = places[:, None] - places
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
