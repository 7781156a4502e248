"""Make a model's rotary positions independent of the other rows of a forward pass, or refuse the model.

transformers computes two kinds from the longest row of a pass, so that a row's logprobs would depend on its neighbours:

- longrope (Phi-3-128k, Phi-4-mini, PhiMoE) has factors for short rows and for long ones. ludic takes one of the two for
  a whole run, as vLLM does by its max_model_len (Phi3LongRoPEScaledRotaryEmbedding in 0.32).
- dynamic has a base that grows with the longest row; it is refused.

The others, such as yarn, llama3 and linear, do not depend on a pass. Raises ModelError for a model, ConfigError for
settings.
"""

import sys
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ludic.base import Longrope
from ludic.errors import ConfigError, ModelError

_LONGROPE, _DYNAMIC = "longrope", "dynamic"


def check_rope(config: PretrainedConfig, where: str) -> None:
    """Raise ModelError for a model whose rotary positions depend on the longest row of a pass."""
    for values in _parameters(config):
        if _DYNAMIC in str(values.get("rope_type")) and not _has_fixed_base(config, values):
            raise ModelError(
                f"{where}: {config.model_type} with rope_type {values['rope_type']} is not supported: a row's rotary "
                "positions, and so its logprobs, would depend on the longest row of a pass; wanted a rope_type that "
                "does not, such as yarn"
            )


def original_length(config: PretrainedConfig) -> int | None:
    """Return the tokens of a longrope model's longest row with its short factors; None for other models."""
    lengths = [
        values["original_max_position_embeddings"]
        for values in _parameters(config)
        if values.get("rope_type") == _LONGROPE
    ]
    return min(lengths, default=None)


def max_positions(config: PretrainedConfig, longrope: Longrope | None) -> int:
    """Return the tokens of a model's longest row; of a longrope model, with the run's factors.

    A model without a table or range of positions, for example with ALiBi, has no limit in its config, or -1.
    """
    positions: int = getattr(config.get_text_config(), "max_position_embeddings", None) or -1
    if positions < 0:
        positions = sys.maxsize
    original = original_length(config)
    return positions if original is None or longrope == "long" else min(original, positions)


def check_served(config: PretrainedConfig, longrope: Longrope | None, max_model_len: Any, where: str) -> None:
    """Raise ConfigError unless vLLM takes the run's factors. max_model_len: vLLM's. where: beginning of the error."""
    original = original_length(config)
    if original is None:
        return
    wanted = f"above {original}" if longrope == "long" else f"of at most {original}"
    is_known = isinstance(max_model_len, int) and max_model_len > 0
    if not is_known or (max_model_len > original) != (longrope == "long"):
        raise ConfigError(
            f"{where} max_model_len {max_model_len}, by which vLLM chooses between the factors of a longrope model; "
            f"this run takes the {longrope or 'short'} ones, so start it with a max_model_len {wanted}"
        )


def pin_rope(model: PreTrainedModel, longrope: Longrope | None) -> None:
    """Give a model rotary positions that no pass changes, in place; its configuration is unchanged.

    longrope: factors of a longrope model; None is short. Raises ModelError as `check_rope` does.
    """
    check_rope(model.config, model.name_or_path or type(model).__name__)
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == _LONGROPE:
                _pin(module, longrope or "short", layer_type)
        if isinstance(kinds, dict):
            module.rope_type = {layer_type: _fixed(kind) for layer_type, kind in kinds.items()}
        elif isinstance(kinds, str):
            module.rope_type = _fixed(kinds)


def _pin(module: Any, longrope: Longrope, layer_type: str | None) -> None:
    config, prefix = module.config, "" if layer_type is None else f"{layer_type}_"
    values = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    device = getattr(module, f"{prefix}inv_freq").device
    length = values["original_max_position_embeddings"] + (longrope == "long")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[_LONGROPE](config, device, seq_len=length, layer_type=layer_type)
    scaling = values.get(f"{longrope}_mscale", scaling)
    setattr(module, f"{prefix}inv_freq", nn.Buffer(frequencies, persistent=False))
    setattr(module, f"{prefix}attention_scaling", scaling)
    if hasattr(module, "rope_init_fn"):
        # PhiMoE computes them in each pass, from its configuration. transformers 5.19 gives it the short factors of
        # long rows too, with the long scale; vLLM and the model's own code take the long ones.
        module.rope_init_fn = partial(_pinned, frequencies, scaling)
        module.config = deepcopy(config)
        module.config.rope_parameters["rope_type"] = _fixed(_LONGROPE)


def _fixed(kind: str) -> str:
    """Return a rope_type that transformers does not change in a pass."""
    return "default" if kind == _LONGROPE or _DYNAMIC in kind else kind


def _pinned(frequencies: Tensor, scaling: float, *_: Any) -> tuple[Tensor, float]:
    return frequencies, scaling


def _parameters(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Return the rotary parameters of a decoder: one for all layers, or one for each type of layer."""
    values = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [part for part in values.values() if isinstance(part, Mapping)]
    return nested or [values]


def _has_fixed_base(config: PretrainedConfig, values: Mapping[str, Any]) -> bool:
    """Return whether a model with rope_type dynamic has a fixed base: HunYuan's alpha gives one for rows of all
    lengths."""
    return config.model_type.startswith("hunyuan") and bool(values.get("alpha"))
