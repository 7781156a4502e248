"""Models with random weights for benchmarks of training steps."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from ludic.training import PACKED_ATTENTION


def make_model(*, attention: str = PACKED_ATTENTION, **sizes: Any) -> PreTrainedModel:
    """Return a model with fixed random weights. sizes: arguments of Qwen3Config."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen3Config(**sizes), attn_implementation=attention).eval()
