"""Train LoRA adapters with peft on linear layers of a frozen model, save and load them, or merge them.

An adapted layer computes W x + (alpha / rank) B A x, with A random and B zero at first (Hu et al. 2021, arXiv
2106.09685, section 4.1). Add adapters before sharding the model. Reads and writes peft's folders:
adapter_config.json and adapter_model.safetensors. Raises ModelError if a layer can't be adapted or a folder does not
fit.
"""

import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ludic.base import ADAPTER_CONFIG, check_adapter
from ludic.errors import ModelError, one_line

# Each trainer imports this module, and most use no adapters; importing peft takes half a second.
if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# --- Adapters that are trained -------------------------------------------------------------------------

_ADAPTER = "default"
_PREFIX = "base_model.model."
"""Prefix of weight names in peft's files, where the model is wrapped twice."""


def add_adapters(
    model: PreTrainedModel, *, source: str, rank: int, alpha: int, targets: Sequence[str] = (), seed: int = 0
) -> None:
    """Freeze an unsharded model and add adapters to its layers in place; its outputs do not change yet.

    Adapters are float32, whatever the model's dtype. source: the model's folder or id, named as the base in
    adapter_config.json. targets: names of linear layers, or the ends of their names, such as q_proj; if empty, all but
    the head and, in a mixture of experts, those named as its experts are. The same seed makes the same adapters. Raises
    ModelError if no layer has a name, or if a layer can't be adapted, such as the embeddings and the head.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _check_targets(model, targets, source)
    if not targets and _has_stacked_experts(model):
        targets = sorted(_linear_names(model) - _OF_EXPERTS)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets) or "all-linear",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=source,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ModelError(f"{source}: can't be adapted: {error}; name linear layers in lora_targets") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()


def try_adapters(folder: str, *, source: str, rank: int, alpha: int, targets: Sequence[str]) -> int:
    """Add adapters to a model of a folder's config.json without memory; returns the number of adapted layers.

    Raises ModelError as `add_adapters` does.
    """
    from ludic.models.weight_files import load_config, make_model

    with torch.device("meta"):
        model = make_model(load_config(folder))
        add_adapters(model, source=source, rank=rank, alpha=alpha, targets=targets)
    return len(_adapted_layers(model))


def has_adapters(model: PreTrainedModel) -> bool:
    return bool(_adapted_layers(model))


def is_adapter_weight(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, judged by its name in the model."""
    return f".{_ADAPTER}." in name and ".lora_" in name


def base_weights(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's own weights, without adapters, under the names that they have without adapters."""
    own = {name: tensor for name, tensor in state_dict.items() if not is_adapter_weight(name)}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in own.items()}


def merged_weights(model: PreTrainedModel, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with W + (alpha / rank) B A for each adapted W, under the names without adapters.

    state_dict: whole tensors of all weights, by their names in the model.
    """
    merged = base_weights(state_dict)
    for name, layer in _adapted_layers(model).items():
        a, b = (state_dict[f"{name}.lora_{part}.{_ADAPTER}.weight"] for part in "AB")
        # Not layer.scaling, which is 0 while another thread has disabled the adapters.
        change = layer.lora_alpha[_ADAPTER] / layer.r[_ADAPTER] * (b @ a)
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = (weight + (change.T if layer.fan_in_fan_out else change)).to(weight.dtype)
    return merged


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters inside the block."""
    # Scale 0 instead of peft's own switch, which also turns gradients off, a change that FSDP2 would see twice a step.
    layers = _adapted_layers(model).values()
    for layer in layers:
        layer.set_scale(_ADAPTER, 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_ADAPTER, 1)


def save_adapter(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write the adapter as a folder that `peft.PeftModel.from_pretrained(base, folder)` loads.

    weights: whole tensors of the adapters, by their names in the model.
    """
    model.peft_config[_ADAPTER].save_pretrained(str(folder))
    tensors = {_PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor.contiguous() for name, tensor in weights.items()}
    safetensors.torch.save_file(tensors, Path(folder) / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: str | Path, where: str) -> dict[str, Tensor]:
    """Return the adapter tensors that `save_adapter` wrote, by their names in the model.

    Raises ModelError, which names `where`, if a file can't be read or the adapters have another scale.
    """
    from peft import LoraConfig

    wanted = model.peft_config[_ADAPTER]
    check_adapter(folder)
    try:
        found = LoraConfig.from_pretrained(str(folder))
        tensors = safetensors.torch.load_file(Path(folder) / ADAPTER_WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(f"{where}: no adapter that peft can load: {error}") from error
    if found.lora_alpha / found.r != wanted.lora_alpha / wanted.r:
        raise ModelError(
            f"{where}: the adapter has lora_alpha {found.lora_alpha} and lora_rank {found.r}, the settings say "
            f"{wanted.lora_alpha} and {wanted.r}; train on with its own"
        )
    return {
        re.sub(r"\.(lora_[AB])\.weight$", rf".\1.{_ADAPTER}.weight", name.removeprefix(_PREFIX)): tensor
        for name, tensor in tensors.items()
    }


_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Suffixes of names that peft treats as parts of stacked experts, even for dense layers or shared experts. It would
adapt the experts, several times as many weights as all else."""


def _has_stacked_experts(model: PreTrainedModel) -> bool:
    """Return whether a layer keeps the weights of all its experts in one tensor."""
    return any(parameter.ndim == 3 and ".experts." in name for name, parameter in model.named_parameters())


def _linear_names(model: PreTrainedModel) -> set[str]:
    """Return the ends of the names of linear layers, without the head."""
    head = model.get_output_embeddings()
    linear = (name for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D) and part is not head)
    return {name.rpartition(".")[2] for name in linear}


def _check_targets(model: PreTrainedModel, targets: Sequence[str], source: str) -> None:
    names = dict(model.named_modules())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for target in targets:
        # peft compares lists of names in the same way.
        found = [module for name, module in names.items() if f".{name}".endswith(f".{target}")]
        if not found:
            raise ModelError(f"{source}: lora_targets has {target!r}, but no layer's name ends with it")
        if any(module is end for module in found for end in ends):
            raise ModelError(
                f"{source}: lora_targets has {target!r}, which is the head or the embeddings; logprobs are made from "
                "the head's own weight, and both may be one tensor: name layers of the decoder"
            )
        if target.rpartition(".")[2] in _OF_EXPERTS and _has_stacked_experts(model):
            raise ModelError(
                f"{source}: lora_targets has {target!r}, which peft takes for the experts of this mixture; name other "
                f"layers: {', '.join(sorted(_linear_names(model) - _OF_EXPERTS))}"
            )


def _adapted_layers(model: PreTrainedModel) -> "dict[str, LoraLayer]":
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


# --- Adapters in a folder, merged into their base model ------------------------------------------------

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def base_of_adapter(folder: str) -> str | None:
    """Return the folder or id of the base model of a LoRA adapter; None if the folder holds no adapter."""
    check_adapter(folder)
    try:
        return json.loads(Path(folder, ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError) as error:
        raise ModelError(f"{folder}: {ADAPTER_CONFIG} names no base model: {one_line(error)}") from error


def merge_adapter(base: PreTrainedModel, folder: str, *, where: str | None = None) -> PreTrainedModel:
    """Return the base with W + (alpha / rank) B A for each adapted W. where: the folder's name in errors."""
    from peft import PeftModel, get_peft_model_state_dict  # takes seconds, not needed without LoRA

    where = where or folder
    check_adapter(folder)
    try:
        with safe_open(Path(folder, ADAPTER_WEIGHTS), "pt") as file:
            found = set(file.keys())
        with warnings.catch_warnings(action="ignore"):  # warnings of missing names, which are refused below
            adapted = PeftModel.from_pretrained(base, folder, torch_device="cpu")
    except Exception as error:  # the type depends on what is broken
        raise ModelError(f"{where}: the LoRA adapter could not be loaded ({one_line(error)})") from error
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if found != wanted:
        raise ModelError(f"{where}: the LoRA adapter does not fit its config; differing: {sorted(found ^ wanted)}")
    return adapted.merge_and_unload()
