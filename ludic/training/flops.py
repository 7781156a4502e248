"""Floating-point operations of a training step, and the part of a device's peak that they are.

Model FLOPs of PaLM (Chowdhery et al. 2022, appendix B): 6 a token for each weight that multiplies it (2 forward, 2 for
the gradient of its input, 2 for its own) and 12 x layers x heads x head size for each pair of tokens of a sequence
(attention's two products). As in other published figures, what is computed twice counts once (activation checkpoints,
the logits of the backward pass), and the masked half of causal attention counts. Because steps are packed, a sequence
attends to its own length, and the head counts for the tokens that have logits. A reference's forward is left out.
"""

# Shapes: S = sequences of a step, of all ranks.

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Of which each token meets only some: config fields of mixtures of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Dense, without sparsity, by vendors' data sheets: TFLOPS in bfloat16 (summed in float32), and in float32 without TF32.
# The first name that is a word of the device's name counts.
_PEAK_TFLOPS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250, 75),
    ("H200 NVL", 835, 60),
    ("H200", 989, 67),
    ("GH200", 989, 67),
    ("H100 PCIe", 756, 51),
    ("H100 NVL", 835, 60),
    ("H100", 989, 67),
    ("A100", 312, 19.5),
    ("A10", 125, 31.2),
    ("L40S", 362, 91.6),
    ("L4", 121, 30.3),
    ("RTX 4090", 165, 82.6),
    ("RTX 3090", 71, 35.6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """FLOPs of a model's forward and backward pass."""

    token: int
    """For each token that goes in, without attention and head."""
    logit: int
    """Of the head, for each token that has logits."""
    pair: int
    """Of attention, for each pair of tokens of a sequence."""


def model_cost(model: PreTrainedModel) -> ModelCost | None:
    """From its weights, sharded or not, and its configuration; None for a mixture of experts."""
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    if head is None or any(getattr(config, name, None) for name in _EXPERTS):
        return None
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    multiplied = [
        weight
        for weight in model.parameters()
        if weight.ndim == 2 and weight is not head.weight and id(weight) not in looked_up
    ]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelCost(
        token=sum(map(_flops_a_token, multiplied)),
        logit=_flops_a_token(head.weight),
        pair=12 * config.num_hidden_layers * config.num_attention_heads * head_size,
    )


def step_flops(cost: ModelCost, prompt_lengths: np.ndarray, response_lengths: np.ndarray) -> float:
    """Of a step over sequences of these lengths, both (S,); one without a response is not trained on."""
    lengths = np.where(response_lengths > 0, prompt_lengths + response_lengths - 1, 0)  # the last one predicts nothing
    num_pairs = np.square(lengths, dtype=np.float64).sum()
    return float(cost.token * lengths.sum() + cost.logit * response_lengths.sum() + cost.pair * num_pairs)


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOPs a second of one device, as `peak_flops` knows them; None for a CPU."""
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOPs a second of a CUDA device; None for one that is not in the table, and for a slice of one (MIG)."""
    if "MIG" in device_name.split():
        return None
    for name, bfloat16, float32 in _PEAK_TFLOPS:
        if re.search(rf"\b{name}\b", device_name):
            return 1e12 * (bfloat16 if dtype == torch.bfloat16 else float32)
    return None


def _flops_a_token(weight: Tensor) -> int:
    return (6 if weight.requires_grad else 4) * weight.numel()
