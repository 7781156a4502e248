"""Compute the floating-point operations of a training step, and look up the peak FLOPs of devices.

Model FLOPs of PaLM (Chowdhery et al. 2022, appendix B): 6 per token and weight that multiplies it (2 for the forward
pass, 2 for the gradient of the input, 2 for the gradient of the weight), and 12 x layers x heads x head size per pair
of tokens of a sequence (attention's two products). As in other published figures, recomputation (activation
checkpoints, the logits of the backward pass) is not counted, and the masked half of causal attention is. In a packed
step a sequence attends only to itself, and the head counts only for tokens that have logits. The forward pass of a
reference is not counted.

Only the experts that a token uses are counted. Not counted are the operations of layers with a state apart from their
matrices, and the savings of a window or chunk.
"""

# Shapes: S = sequences of a step, of all ranks.

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ludic.errors import ConfigError, unknown_name
from ludic.models import CHOSEN, EXPERTS, WITHOUT_ATTENTION, first_of

# Dense TFLOPS from vendors' data sheets, without sparsity: bfloat16 (accumulated in float32), and float32 without TF32;
# and memory in GB. The first entry whose name occurs as whole words in the device's name is used.
_GPUS: tuple[tuple[str, float, float, int], ...] = (
    ("B200", 2250, 75, 180),
    ("H200 NVL", 835, 60, 141),
    ("H200", 989, 67, 141),
    ("GH200", 989, 67, 96),
    ("H100 PCIe", 756, 51, 80),
    ("H100 NVL", 835, 60, 94),
    ("H100", 989, 67, 80),
    ("A100 40GB", 312, 19.5, 40),
    ("A100", 312, 19.5, 80),
    ("A10", 125, 31.2, 24),
    ("L40S", 362, 91.6, 48),
    ("L4", 121, 30.3, 24),
    ("RTX 4090", 165, 82.6, 24),
    ("RTX 3090", 71, 35.6, 24),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """FLOPs of a model's forward and backward pass."""

    token: int
    """FLOPs per input token, without attention and head."""
    logit: int
    """FLOPs of the head per token that has logits."""
    pair: int
    """FLOPs of attention per pair of tokens of a sequence."""


def model_cost(model: PreTrainedModel) -> ModelCost | None:
    """Return a model's cost from its weights, sharded or not, and its configuration.

    Returns None for a model without a head, and for a mixture of experts of an unknown layout.
    """
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    num_experts, num_used = (first_of(config, names) for names in (EXPERTS, CHOSEN))
    stacked = [weight for weight in model.parameters() if weight.ndim == 3 and weight.shape[0] == num_experts]
    if head is None or (num_experts and not (num_used and stacked)):
        return None
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    multiplied = [
        weight
        for name, weight in model.named_parameters()
        if weight.ndim == 2
        and weight is not head.weight
        and id(weight) not in looked_up
        and not name.endswith("bias")  # experts have a bias each, stacked
    ]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelCost(
        token=sum(map(_flops_a_token, multiplied))
        + sum(_flops_a_token(weight) * num_used // num_experts for weight in stacked),
        logit=_flops_a_token(head.weight),
        pair=12 * _num_attention_layers(config) * config.num_attention_heads * head_size,
    )


def _num_attention_layers(config: PreTrainedConfig) -> int:
    kinds = getattr(config, "layer_types", None)
    return config.num_hidden_layers if kinds is None else sum(kind not in WITHOUT_ATTENTION for kind in kinds)


def step_flops(cost: ModelCost, prompt_lengths: np.ndarray, response_lengths: np.ndarray) -> float:
    """Return the FLOPs of a step over sequences of these lengths, both (S,); empty responses are not trained on."""
    # The last token of a sequence is never an input.
    lengths = np.where(response_lengths > 0, prompt_lengths + response_lengths - 1, 0)
    num_pairs = np.square(lengths, dtype=np.float64).sum()
    return float(cost.token * lengths.sum() + cost.logit * response_lengths.sum() + cost.pair * num_pairs)


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOPs per second of a device, see `peak_flops`; None for a CPU."""
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOPs per second of a CUDA device; None for a MIG slice or a device that is not in the table."""
    if "MIG" in device_name.split():
        return None
    for name, bfloat16, float32, _ in _GPUS:
        if re.search(rf"\b{name}\b", device_name):
            return 1e12 * (bfloat16 if dtype == torch.bfloat16 else float32)
    return None


def gpu_bytes(name: str) -> int:
    """Return the memory of a GPU by its name in the table, such as H100. Raises ConfigError, which lists the names."""
    sizes = {known.lower(): gigabytes * 10**9 for known, _, _, gigabytes in _GPUS}
    if name.lower() not in sizes:
        raise ConfigError(f"{unknown_name('GPU', name, [known for known, *_ in _GPUS])}; or give its memory")
    return sizes[name.lower()]


def _flops_a_token(weight: Tensor) -> int:
    return (6 if weight.requires_grad else 4) * weight.numel()
