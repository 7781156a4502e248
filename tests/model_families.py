"""Random models of a few thousand parameters from several families, for tests."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ludic.models.families import shrink, spread
from ludic.training.packed import PACKED_ATTENTION

VOCAB_SIZE = 256

# Shorter than the sequences that tests make, so that the window is seen.
_WINDOW = 6
_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "head_dim": 16}),
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "gemma": (GemmaConfig, {"head_dim": 16}),
    "gemma2": (
        Gemma2Config,
        {"head_dim": 16, "sliding_window": _WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": 0.5},
    ),
    "gemma3": (
        Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
FAMILIES = tuple(_FAMILIES)


def random_model_of(family: str, *, attention: str = PACKED_ATTENTION, **settings: object) -> PreTrainedModel:
    """A model with random weights, the same at every call; Gemmas and qwen2 tie their embeddings."""
    config_class, own = _FAMILIES[family]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        **own | settings,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def small_model_of(family: str, *, attention: str = PACKED_ATTENTION, **settings: object) -> PreTrainedModel:
    """A small model of any family in float64, with large random weights, so that sinks and states matter."""
    config = shrink(AutoConfig.for_model(family, **settings))
    config.vocab_size = VOCAB_SIZE
    torch.manual_seed(0)
    # The grouped products of experts do not run in float64.
    experts = {"experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float64, **experts)
    with torch.no_grad():
        spread(model)
    return model.eval()
