"""Attention for decoding, where each sequence asks with one new token.

Query heads that share a key and value head are the rows of one small matrix, so keys and values are read as they are.
transformers' sdpa repeats them for each query head, which takes three times as long on a CPU (benchmarks/README.md).
Prompts, and models that do more than a mask and a scale, run transformers' sdpa.
"""

# Shapes: B = sequences, T = new tokens, L = tokens of the longest, H = heads, K = key and value heads, D = head size.

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

DECODING_ATTENTION = "ludic_decoding"
"""attn_implementation of models that are sampled from on a CPU."""

_BEYOND_A_MASK = ("position_bias", "softcap", "s_aux", "cache")
"""Arguments of attention functions that change the result, apart from mask, scale and dropout."""


def use_decoding_attention(model: PreTrainedModel) -> None:
    """Switch a model from transformers' sdpa to this attention; other models stay as they are."""
    if model.config._attn_implementation == "sdpa" and _can_switch(model):
        model.set_attn_implementation(DECODING_ATTENTION)


def _can_switch(model: PreTrainedModel) -> bool:
    """Return whether a model calls registered attention functions, and takes no decision by their names.

    transformers reads the source too. Models with an indexer, such as GLM-5, pass other arguments to unknown names.
    """
    if model.config.get_text_config() is not model.config:
        return False
    source = inspect.getsource(sys.modules[type(model).__module__])
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in source and '"sdpa"' not in source


def decoding_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers; returns (B, T, H, D). query: (B, H, T, D). key, value: (B, K, L, D)."""
    num_sequences, num_heads, num_tokens, _ = query.shape
    is_plain = not options.get("dropout") and all(options.get(name) is None for name in _BEYOND_A_MASK)
    masks_all_heads = attention_mask is None or attention_mask.shape[1] == 1
    if num_tokens > 1 or key.shape[1] == num_heads or not (is_plain and masks_all_heads):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    groups = query.reshape(num_sequences, key.shape[1], -1, query.shape[-1])
    output = scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=options.get("scaling"))
    return output.reshape(num_sequences, 1, num_heads, -1), None


def decoding_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None,
    mask_function: Callable[..., Tensor],
    **options: Any,
) -> Tensor | None:
    """Mask function for transformers; returns (B, 1, q_length, L) bool, or None if nothing is masked.

    attention_mask: (B, L), 0 for padding. A last token sees all tokens that the cache holds, so its mask is that of the
    padding, unless the cache holds a window of kv_length tokens only.
    """
    sees_all = q_length == 1 and mask_function is causal_mask_function
    if sees_all and attention_mask is not None and attention_mask.shape[1] == kv_length:
        return attention_mask[:, None, None, :].bool()
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, mask_function=mask_function, **options
    )


AttentionInterface.register(DECODING_ATTENTION, decoding_attention)
AttentionMaskInterface.register(DECODING_ATTENTION, decoding_mask)
