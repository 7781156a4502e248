"""Models of random weights, small enough for a step to be timed."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from ludic.training.attention import PACKED_ATTENTION


def make_model(*, attention: str = PACKED_ATTENTION, **sizes: Any) -> PreTrainedModel:
    """The same for the same sizes, which are those of a Qwen3Config."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen3Config(**sizes), attn_implementation=attention).eval()
