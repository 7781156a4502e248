"""Compute the cost of attention relative to a model's weights, from its configuration alone.

Nothing is loaded. Any configuration is treated as a transformer decoder with gated MLPs of its width.
ludic.training.memory has the sizes of weights and activations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# Fields of configurations that say how many experts a mixture has, how many a token uses, and how wide each is.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "mlp", "moe")
"""Names in layer_types of layers without attention, which compare no pairs of tokens and store no keys."""
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "ffn_hidden_size")


def attention_tokens(config: Any) -> int:
    """Return the length of a sequence at which attention takes as many operations as the weights. config: of a model.

    A token takes 2 operations a weight; of a mixture, of the experts that it uses. Each pair of a token with an earlier
    one takes 4 a query's width (two products), and there are half as many pairs as tokens squared.
    """
    values: Mapping[str, Any] = config.get_text_config(decoder=True).to_dict()
    hidden = _number(values, ("hidden_size",), 1024)
    heads = _number(values, ("num_attention_heads",), max(1, hidden // 128))
    head = _number(values, ("head_dim",), max(1, hidden // heads))
    queries, keys = heads * head, _number(values, ("num_key_value_heads",), heads) * head
    mlp = _number(values, ("intermediate_size",), 4 * hidden)
    if _number(values, EXPERTS, 0) > 0:
        width = _number(values, _EXPERT_WIDTH, mlp)
        shared = _number(values, ("shared_expert_intermediate_size",), 0)
        shared += _number(values, ("n_shared_experts",), 0) * width
        mlp = _number(values, CHOSEN, 1) * width + shared
    return max(1, (2 * hidden * (queries + keys) + 3 * hidden * mlp) // queries)


def first_of(config: Any, names: Sequence[str]) -> Any:
    """Return the value of the first of these fields that a configuration has and that is not 0 or empty; else 0."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def _number(values: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    """Return the first of these fields that is a whole number above 0."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default
