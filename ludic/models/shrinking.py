"""Shrink a model's configuration: a few small layers, one of each kind, which compute what the large ones compute.

Only numbers that say how large something is are changed, by their names; scales, windows' presence, kinds of layers,
kinds of positions and every switch stay. Pure; raises what transformers raises for a configuration that it refuses.
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

VOCAB_SIZE = 128
WINDOW = 6
"""Tokens that a layer with a window sees; sequences of a probe are longer."""

_HEADS, _HEAD, _HIDDEN, _EXPERTS = 4, 16, 64, 4
_FIRST_SPECIAL = 120
"""Ids from here on are those of special tokens, such as the end of a sequence or an image."""
_MOST_KINDS = 4
_DROPPED = ("architectures", "auto_map", "dtype", "id2label", "label2id", "quantization_config", "transformers_version")

_LAYERS = re.compile(r"(num_)?(hidden|encoder|decoder)_layers|n_layers?|num_layers|depth|num_layers_per_stack")
_HEAD_COUNTS = re.compile(r"(\w+_)?(num|n)_(\w*_)?heads?|(encoder|decoder)_attention_heads|attention_heads")
_KEY_HEADS = re.compile(r"(\w+_)?num_(key_value|kv)_heads|n_head_kv|num_query_groups")
_HIDDENS = re.compile(
    r"hidden_size|d_model|n_embd|dim|emb(edding)?_dim|(\w+_)?embedding_size|word_embed_proj_dim|lru_width"
)
_AT_MOST: Mapping[re.Pattern[str], int] = {
    re.compile(pattern): most
    for pattern, most in {
        r"(\w+_)?head_dim|attention_head_size|dim_head|kv_channels|d_head|mamba_d_head": _HEAD,
        r"rotary_dim": _HEAD // 2,
        r"(\w+_)?(intermediate|feed_forward|ffn|ffn_hidden|mlp)_(size|dim)(_\w+)?|n_inner|dff|dim_ff|d_ff|d_inner": 48,
        r"(\w+_)?lora_rank|laurel_rank|(\w+_)?lowrank|d_rel": 24,
        r"(num|n)_(routed_|local_)?experts|moe_num_experts": _EXPERTS,
        r"num_experts_per_tok(en)?|top_k\w*|moe_top_?k|moe_k": 2,
        r"n_group": 2,
        r"topk_group": 1,
        r"(\w+_)?vocab(_size(_\w+)?)?|vocab_offset": VOCAB_SIZE,
        r"(\w*_)?(sliding_|attention_|local_)?window(_size)?|attention_chunk_size|local_attention": WINDOW,
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len": 4096,
        r"index_topk": WINDOW,
        r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index": 1,
        r"\w+_(period|interval|pattern|freq)|\w+_every_n_layers|decoder_sparse_step": 2,
        r"\w+_(layer_)?offset": 1,
        r"hidden_size_per_layer_input": 16,
    }.items()
}


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a small configuration of the same family; parts for images or sound shrink like the decoder."""
    values = _shrunk(config.to_dict())
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name not in _DROPPED and not name.startswith("_name")}
    depth = next((value for name, value in kept.items() if _is_size(value) and _LAYERS.fullmatch(name)), None)
    layers = _layers_of_each_kind(kept, depth)
    heads = next((value for name, value in kept.items() if _is_size(value) and _HEAD_COUNTS.fullmatch(name)), _HEADS)
    small = {name: _part(name, value, kept, depth, layers, heads) for name, value in kept.items()}
    if "head_dim" in small and small["head_dim"] is None and _is_size(small.get("hidden_size")):
        small["head_dim"] = small["hidden_size"] // min(heads, _HEADS)
    return small


def _part(name: str, value: Any, values: Mapping[str, Any], depth: int | None, layers: list[int], heads: int) -> Any:
    """Return the small value of one entry. layers: those that are kept of `depth`. heads: attention heads before."""
    if isinstance(value, dict) and depth is not None and value and all(str(key).isdigit() for key in value):
        by_layer = {int(key): _shrunk(part) if isinstance(part, dict) else part for key, part in value.items()}
        return {new: by_layer[old] for new, old in enumerate(layers) if old in by_layer}
    if isinstance(value, dict):
        return _shrunk_rope(value, values) if "rope_type" in value or "rope" in name else _shrunk(value)
    if isinstance(value, list) and depth is not None and len(value) == depth:
        return [value[layer] for layer in layers]
    if re.fullmatch(r"\w+_token_(id|index)", name):
        return _special(value)
    if not _is_size(value):
        return value
    if name == "qk_head_dim" and "qk_rope_head_dim" in values:
        return sum(min(_HEAD, values[part]) for part in ("qk_nope_head_dim", "qk_rope_head_dim"))
    if name.startswith("mamba_") and _HEAD_COUNTS.fullmatch(name):
        return min(value, 2 * _HEADS)  # heads of a state are twice as wide in all as the hidden states
    if _LAYERS.fullmatch(name):
        return min(value, len(layers))
    if _KEY_HEADS.fullmatch(name):
        return 1 if value == 1 else min(heads, _HEADS) if value >= heads else max(1, min(heads, _HEADS) // 2)
    if _HEAD_COUNTS.fullmatch(name):
        return min(value, _HEADS)
    if _HIDDENS.fullmatch(name):
        return value if value <= _HIDDEN and heads <= _HEADS else min(heads, _HEADS) * _HEAD
    if name.startswith("num_") and name.endswith("_layers") and depth:
        return round(value * len(layers) / depth)
    return next((min(value, most) for pattern, most in _AT_MOST.items() if pattern.fullmatch(name)), value)


def _layers_of_each_kind(values: Mapping[str, Any], depth: int | None) -> list[int]:
    """Return the first layer of each kind, twice over: a later layer sees what an earlier one let through."""
    if depth is None:
        return [0, 0]
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == depth]
    tables = [value for value in values.values() if isinstance(value, dict)]
    kinds = {
        str(
            [entries[layer] for entries in lists] + [table.get(layer, table.get(str(layer))) for table in tables]
        ): layer
        for layer in reversed(range(depth))
    }
    first = sorted(kinds.values())[:_MOST_KINDS]
    return first + first


def _shrunk_rope(rope: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions: lists have an entry for each pair of a head's numbers."""
    head = values.get("head_dim") or values.get("hidden_size", _HIDDEN) // values.get("num_attention_heads", _HEADS)
    share = min(1.0, _HEAD / head)

    def fit(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _shrunk_rope(value, values)
        if name.endswith("_factor") and isinstance(value, list):
            return value[: max(1, round(len(value) * share))]
        return [max(1, round(part * share)) for part in value] if name == "mrope_section" else value

    return {name: fit(name, value) for name, value in rope.items()}


def _special(value: Any) -> Any:
    if isinstance(value, list):
        return [_special(part) for part in value]
    return value if not _is_size(value) or value < 3 else _FIRST_SPECIAL + value % (VOCAB_SIZE - _FIRST_SPECIAL)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
