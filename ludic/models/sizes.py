"""Sizes of a decoder layer from a model's configuration: its weights, its activations, and what attention costs.

The formulas are of transformer decoders with fused attention and a gated MLP. A configuration of another kind gets the
figures of such a decoder of its width. Nothing is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

# Fields of configurations that say how many experts a mixture has, how many a token uses, and how wide each is.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "mlp", "moe")
"""Kinds of layers, by the names of layer_types, that compare no pairs of tokens and keep no keys."""
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "ffn_hidden_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Widths of a decoder layer, and the number of layers."""

    num_layers: int
    hidden: int
    """Width of the hidden states."""
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together, and of the value heads."""
    mlp: int
    """Width inside the MLP; of a mixture, of the experts that one token uses together."""
    all_mlp: int
    """Width of all experts together; `mlp` without a mixture."""
    vocabulary: int
    is_tied: bool
    """Whether the head has the weights of the embedding."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the sizes of a configuration of transformers."""
        values: Mapping[str, Any] = config.get_text_config(decoder=True).to_dict()
        hidden = _number(values, ("hidden_size",), 1024)
        heads = _number(values, ("num_attention_heads",), max(1, hidden // 128))
        head = _number(values, ("head_dim",), max(1, hidden // heads))
        mlp = all_mlp = _number(values, ("intermediate_size",), 4 * hidden)
        if (experts := _number(values, EXPERTS, 0)) > 0:
            width = _number(values, _EXPERT_WIDTH, mlp)
            shared = _number(values, ("shared_expert_intermediate_size",), 0)
            shared += _number(values, ("n_shared_experts",), 0) * width
            mlp, all_mlp = _number(values, CHOSEN, 1) * width + shared, experts * width + shared
        return cls(
            num_layers=_number(values, ("num_hidden_layers",), 1),
            hidden=hidden,
            queries=heads * head,
            keys=_number(values, ("num_key_value_heads",), heads) * head,
            mlp=mlp,
            all_mlp=all_mlp,
            vocabulary=_number(values, ("vocab_size",), 1),
            is_tied=bool(values.get("tie_word_embeddings")),
        )

    @property
    def layer_weights(self) -> int:
        """Number of weights of a layer; of a mixture, with all experts."""
        return self._attention_weights + 3 * self.hidden * self.all_mlp

    @property
    def root_weights(self) -> int:
        """Number of weights of embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2)

    @property
    def num_weights(self) -> int:
        return self.num_layers * self.layer_weights + self.root_weights

    @property
    def layer_activations(self) -> int:
        """Numbers that a layer keeps for each token for its backward pass, in its own dtype.

        10 of the hidden width: input, two norms in float32 and their results, sums. 5 of queries, keys and values:
        projections, norms, rotations, the attention's input and output. 4 of the MLP: gate, its activation, up and
        their product.
        At Qwen3-8B's sizes this is 236 KiB in bfloat16; 231 KiB were measured.
        """
        return 10 * self.hidden + 5 * (self.queries + 2 * self.keys) + 4 * self.mlp

    @property
    def attention_tokens(self) -> int:
        """Length of a sequence at which attention takes as many operations as the weights.

        A token takes 2 operations a weight. Each pair of a token with an earlier one takes 4 a query's width (two
        products), and there are half as many pairs as tokens squared.
        """
        return max(1, (self._attention_weights + 3 * self.hidden * self.mlp) // self.queries)

    @property
    def _attention_weights(self) -> int:
        return 2 * self.hidden * (self.queries + self.keys)


def _number(values: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    """Return the first of these fields that is a whole number above 0."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default
