"""Load Hugging Face causal language models, shard them with FSDP2, run them on packed tokens, and save them.

Reads and writes local folders in Hugging Face form. Raises ModelError, which names the folder and the problem, if a
model is missing, incomplete or of another shape.

Models stay in eval mode, so that dropout does not change the trainer's logprobs against the sampler's.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ludic.base import Longrope, from_main, is_main, run_on_main, temporary_folder
from ludic.errors import ModelError, one_line
from ludic.models import (
    TokensWithLogprobs,
    check_family,
    check_model,
    decoder_layers,
    has_adapters,
    is_adapter_weight,
    load_config,
    load_generation_config,
    load_pretrained,
    make_config,
    make_model,
    merged_weights,
    probe_sequences,
    save_adapter,
    shrink,
    spread,
    without_kernels,
    without_progress_bars,
)
from ludic.root.weights import local_folder, tokenizer_files, write_files
from ludic.training.batches.packing import TrainingSequence, pack
from ludic.training.config import TrainConfig
from ludic.training.logprobs import check_head, register_token_logprobs, token_logprobs
from ludic.training.packed import PACKED_ATTENTION, by_sequence, keep_uncompiled, run_at_once
from ludic.training.router_losses import checkpoint_contexts

logger = logging.getLogger(__name__)

_WEIGHT_NAMES = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)
_WHAT = "packed sequences, as in training"
_PT_NAMES = ("pytorch_model.pt", "pytorch_model.pt.index.json")


def load_model(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    strict: bool = False,
    longrope: Longrope | None = None,
) -> PreTrainedModel:
    """Load a causal language model into CPU memory, in eval mode, with attention that keeps packed sequences apart.

    source: a folder or URL with weights in model.safetensors, pytorch_model.bin or pytorch_model.pt, whole or in
    shards with an index, or a Hugging Face id. Only tensors are unpickled. longrope: of RunConfig.
    Raises ModelError if it can't be read, if a weight is missing or has another shape than config.json says, or if
    packed sequences get other logprobs than transformers gives to each alone (ludic.models.families).
    If strict, also raises ModelError if there is a weight that the model does not use.
    """
    with local_folder(source) as found, _known_names(found) as folder:
        is_judged = check_trainable(folder, source)
        model = load_pretrained(
            folder,
            dtype=dtype,
            where=source,
            strict=strict,
            longrope=longrope,
            attn_implementation=PACKED_ATTENTION,
            weights_only=True,
        )
    if not is_judged:
        check_model(model, source, _packed, what=_WHAT)
    with without_kernels():
        check_head(model, source)
    return model


def check_trainable(folder: str, source: str) -> bool:
    """Raise ModelError if packed models of a folder's configuration get wrong logprobs; return whether that was
    tested."""
    return check_family(folder, source, _packed, attention=PACKED_ATTENTION, what=_WHAT)


def _packed(model: PreTrainedModel) -> TokensWithLogprobs:
    """Return the logprobs of probe sequences, packed as in training. Raises ModelError where the cause is known."""
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
        raise ModelError("it caps its attention scores (attn_logit_softcapping), which PyTorch's fused attention can't")
    check_head(model, model.config.model_type)
    sequences = probe_sequences(model)
    logprobs = packed_logprobs(model, sequences)
    return list(zip(sequences, logprobs.split([len(tokens) - 1 for tokens in sequences]), strict=True))


def packed_logprobs(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> Tensor:
    """Return the logprobs of all tokens but the first of each sequence, end to end, by one packed pass.

    sequences: each (length,) int32, at least two tokens.
    """
    rows = [
        TrainingSequence(
            rollout_id=str(index),
            prompt_tokens=tokens[:1],
            response_tokens=tokens[1:],
            advantage=0.0,
            columns={"response_logprobs": np.zeros(len(tokens) - 1, np.float32)},
        )
        for index, tokens in enumerate(sequences)
    ]
    return token_logprobs(model, pack(rows).to(model.device))[0]


_KERNEL_TOLERANCE = 0.02
"""Tolerance in nats, and as a share of the gradient: rounding of kernels is smaller, and a lost border changes some
tokens far more."""


def kernels_keep_borders(config: PreTrainedConfig, device: torch.device) -> bool:
    """Return whether the installed kernels of layers with a state reset it at the borders of packed sequences.

    Tried on a small random model on the device: one pass over the pack must give the logprobs and the gradient of one
    sequence after the other. transformers silently drops borders if a kernel does not accept them, like its own
    functions on a CPU.
    """
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            model = make_model(shrink(config), attention=PACKED_ATTENTION).eval().to(device)
            with torch.no_grad():
                spread(model)
        wanted = _logprobs_and_gradient(model)
        run_at_once(model)
        found = _logprobs_and_gradient(model)
    except Exception as error:  # each kernel refuses shapes, dtypes or names differently
        logger.debug("kernels of %s do not run on a whole pack: %s", config.model_type, one_line(error))
        return False
    of_gradient = (found[1] - wanted[1]).norm() / wanted[1].norm()
    return bool((found[0] - wanted[0]).abs().max() <= _KERNEL_TOLERANCE and of_gradient <= _KERNEL_TOLERANCE)


def _logprobs_and_gradient(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    logprobs = packed_logprobs(model, probe_sequences(model))
    model.zero_grad()
    logprobs.sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logprobs.detach(), torch.cat(gradients)


@contextmanager
def _known_names(folder: Path) -> Iterator[str]:
    """Yield a folder with file names that transformers knows: links to .pt files are named .bin."""
    renamed = {name: name.replace(".pt", ".bin", 1) for name in _PT_NAMES if (folder / name).is_file()}
    if not renamed or any((folder / name).is_file() for name in _WEIGHT_NAMES):
        yield str(folder)
        return
    with temporary_folder("links") as links:
        for file in folder.iterdir():
            (links / renamed.get(file.name, file.name)).symlink_to(file.resolve())
        yield str(links)


def load_sharded(
    source: str,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[PreTrainedModel], None] = lambda model: None,
    with_weights: bool = True,
    longrope: Longrope | None = None,
    **options: Any,
) -> PreTrainedModel:
    """`load_model`, `prepare` and `shard` for a model that may not fit into one rank; every rank must call it.

    Only rank 0 reads the source. Only its CPU memory holds the whole model; it sends each rank its shards, one tensor
    at a time. A rank's device never holds more than its shards and one layer. dtype: of the shards. prepare:
    changes the whole model in place, in the same way on every rank, for example adds adapters. with_weights: if false,
    the source needs only config.json, and the weights are uninitialised until the caller loads them. longrope: of
    RunConfig. options: those of `shard`. Raises the errors of `load_model` and `prepare` on every rank.
    """
    loaded: list[PreTrainedModel] = []

    def load() -> str:
        if with_weights:
            model = load_model(source, dtype=dtype, longrope=longrope)
        else:
            model = _configured(source, dtype, longrope)
        config = model.config.to_json_string(use_diff=False)
        prepare(model)
        loaded.append(model)
        return config

    config = run_on_main(load)
    if is_main():
        model = loaded.pop()
    else:
        model = _without_weights(_parse_config(config), dtype, longrope)
        prepare(model)
    is_sent = with_weights and mesh.size() > 1
    # Sharding replaces the parameters, so keep the whole tensors.
    weights = dict(model.state_dict()) if is_main() and is_sent else {}
    shard(model, mesh, **options)
    for name, tensor in model.state_dict().items() if is_sent else ():
        tensor.copy_(from_main(weights.pop(name, None), like=tensor))
    device = model.device
    if device.type == "cuda" and by_sequence(model):
        if run_on_main(lambda: kernels_keep_borders(_parse_config(config), device)):
            run_at_once(model)
        elif is_main():
            logger.info("%s: layers with a state run on one packed sequence after the other", source)
    return model


def _configured(folder: str, dtype: torch.dtype, longrope: Longrope | None) -> PreTrainedModel:
    """Return the model of a folder's config.json and generation_config.json, with uninitialised weights."""
    check_trainable(folder, folder)
    try:
        model = _without_weights(load_config(folder), dtype, longrope)
        if generation := load_generation_config(folder):
            model.generation_config = generation
    except ModelError:
        raise
    except Exception as error:  # the type depends on the parser, as in load_model
        raise ModelError(f"{folder}: not a configuration that transformers can use: {one_line(error)}") from error
    return model


def _parse_config(data: str) -> PreTrainedConfig:
    return make_config(json.loads(data))


def _without_weights(config: PreTrainedConfig, dtype: torch.dtype, longrope: Longrope | None) -> PreTrainedModel:
    """Return a model with uninitialised parameters; memory that is never touched is not allocated."""
    with no_init_weights():
        model = make_model(config, dtype=dtype, attention=PACKED_ATTENTION, longrope=longrope)
    model.tie_weights()
    return model.eval()


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
    offload: bool = False,
    float32_head: bool = False,
) -> None:
    """Shard the parameters over the mesh in place: one FSDP2 unit per decoder layer and one for the rest.

    A single rank that neither converts nor off-loads shards nothing: its model moves to the device and stays whole.
    FSDP2 would make its steps up to a half slower (benchmarks/one_rank.py).

    compute_dtype: dtype of parameters and activations in forward and backward; None computes in the parameters' dtype.
    Gradients are reduced in float32, and the optimizer keeps the parameters' dtype.
    activation_checkpointing: keep only a layer's input, and recompute the rest in the backward pass.
    compile_layers: run each layer, except its attention, through torch.compile.
    offload: keep the shards in CPU memory, and move one unit at a time to the mesh's device.
    float32_head: compute the logits of `token_logprobs` in float32, whatever the compute_dtype.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    make_unit = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload_policy)
    converts = compute_dtype is not None and any(p.dtype != compute_dtype for p in model.parameters())
    if mesh.size() == 1 and not converts and not offload:
        make_unit = partial(nn.Module.to, device=torch.device(mesh.device_type))
    if compile_layers:
        keep_uncompiled()
    for layer in decoder_layers(model):
        # Wrapping forward keeps both inside FSDP's hooks and leaves the parameters' names as they are. Shapes are
        # dynamic from the start, since every micro-batch has another length.
        if compile_layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if activation_checkpointing:
            # Hugging Face's own switch has no effect in eval mode.
            contexts = partial(checkpoint_contexts, layer)
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
        make_unit(layer)
    # Tied embeddings are in the root unit together, so FSDP2 shards them as one parameter.
    make_unit(model)
    register_token_logprobs(model, float32_head=float32_head)


def compute_dtype(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype for `shard`; None keeps the weights' float32."""
    return torch.bfloat16 if config.model.dtype == "bfloat16" else None


def publish_dtype(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype of published weights for `save_weights`; None keeps the weights' float32."""
    return compute_dtype(config) if config.model.publish_dtype is None else getattr(torch, config.model.publish_dtype)


def full_state_dict(model: PreTrainedModel, *, adapters_only: bool = False) -> dict[str, Tensor]:
    """Return whole tensors on the CPU of rank 0, and nothing on other ranks; every rank must call it.

    Of tied weights, only the tensor that Hugging Face saves is kept. adapters_only: return only adapters, and do not
    gather frozen weights.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapters_only)
        state = get_model_state_dict(model, options=options)
    else:  # torch takes 14 ms to see that there is nothing to gather
        state = {name: value.cpu() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    tied = model.all_tied_weights_keys
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in tied}
    return {name: tensor for name, tensor in tensors.items() if is_adapter_weight(name) or not adapters_only}


def detached(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors that the next step does not change: clones those that off-loading did not copy.

    These are all tensors of a model on the CPU, and AdamW's step counts, scalars that are always on the CPU.
    """
    return {
        name: tensor.clone() if device.type == "cpu" or tensor.ndim == 0 else tensor for name, tensor in tensors.items()
    }


def save_weights(
    model: PreTrainedModel,
    state_dict: Mapping[str, Tensor],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write config.json, generation_config.json and safetensors; on rank 0 only.

    state_dict: from `full_state_dict`. Adapters in it are merged into the weights; if it has only adapters, peft's
    files are written. dtype: of floating-point weights in the files; None keeps their dtype, as adapters always do.
    max_shard_size: maximum size of a file, such as 500MB; larger weights are split into shards with an index.
    """
    if state_dict and all(map(is_adapter_weight, state_dict)):
        model.config.save_pretrained(folder)
        save_adapter(model, state_dict, folder)
        return
    if has_adapters(model):
        state_dict = merged_weights(model, state_dict)
    if dtype is not None:
        state_dict = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state_dict.items()}
    with without_progress_bars():
        model.save_pretrained(folder, state_dict=dict(state_dict), max_shard_size=max_shard_size)
    if dtype is not None:
        _set_config_dtype(Path(folder) / "config.json", dtype)


def copy_tokenizer(source: str, folder: str | Path) -> None:
    """Copy a model's tokenizer and chat template byte for byte; copies nothing if the model has none.

    Raises ModelError if there is neither such a folder nor such a model on the Hub.
    """
    with local_folder(source, with_weights=False) as origin:
        write_files(tokenizer_files(origin), Path(folder))


def _set_config_dtype(path: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the saved weights to config.json: save_pretrained writes the dtype of the model in memory."""
    config = json.loads(path.read_bytes())
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
