"""Write and load checkpoints of the trainer's state, which are complete or invisible; any number of ranks can resume.

Writes checkpoints/attempt=A/step=S/:
    config.json, model*.safetensors*   weights, as a Hugging Face folder; with LoRA peft's adapter_config.json and
                                       adapter_model.safetensors, whose base is the run's model
    optimizer.safetensors              moments of each parameter; settings come from the config at resume. Moments in
                                       8 bits are two tensors, codes and scale (ludic.training.adamw_8bit)
    random.safetensors                 generator states of each rank
    digests.json                       digests of these files
    checkpoint.json                    CheckpointInfo; put last, as the marker of a complete checkpoint

The trainer copies the state (`take_snapshot`); any thread of rank 0 writes it (`write_checkpoint`). Raises ModelError,
which names the tensor, if a checkpoint doesn't fit the model, before anything is changed.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ludic.base import bytes_from_main, from_main, is_main, num_ranks, rank
from ludic.errors import ModelError, NameTakenError
from ludic.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, has_adapters, is_adapter_weight, load_adapter
from ludic.root import MARKER, CheckpointInfo, Root, encode_record, folder_of
from ludic.root.weights import check_copy, write_manifest
from ludic.training.adamw_8bit import from_file, set_quantized, split_moments, to_file
from ludic.training.model import detached, full_state_dict, load_model, save_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Copy of the trainer's state that later steps do not change; complete on rank 0 only."""

    info: CheckpointInfo
    model: PreTrainedModel
    """Model whose configuration is written; its weights are not read."""
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    random_states: Mapping[str, Tensor]


def take_snapshot(
    model: PreTrainedModel,
    optimizer: Optimizer,
    *,
    attempt_id: int,
    step: int,
    policy_version: int,
    cursor: Mapping[str, Any],
    config: Mapping[str, Any],
) -> TrainerState:
    """Copy the state of a checkpoint to the CPU of rank 0; every rank must call it."""
    info = CheckpointInfo(
        attempt_id=attempt_id,
        step=step,
        policy_version=policy_version,
        cursor=cursor,
        config=config,
        num_ranks=num_ranks(),
    )
    moments = to_file(_whole(split_moments(_moments(model, optimizer))))
    return TrainerState(
        info=info,
        model=model,
        weights=detached(full_state_dict(model, adapters_only=has_adapters(model)), model.device),
        moments=detached(moments, model.device),
        random_states=_gather_random_states(),
    )


def write_checkpoint(
    root: Root,
    snapshot: TrainerState,
    *,
    max_shard_size: str = "5GB",
    check: Callable[[], None] = lambda: None,
    before_marker: Callable[[], None] = lambda: None,
) -> None:
    """Write a snapshot, its marker last; call it in any thread of rank 0. Raises StoreError or NameTakenError.

    max_shard_size: see `save_weights`. check: raises if the root no longer belongs to this trainer; called before the
    files are uploaded and before the marker is written, since writing a large model takes minutes. before_marker: waits
    for other data of this step that a successor expects.
    """
    info = replace(snapshot.info, run_id=root.run_id)
    name = folder_of(info)
    with root.scratch_folder() as folder:
        save_weights(snapshot.model, snapshot.weights, folder, max_shard_size=max_shard_size)
        safetensors.torch.save_file(dict(snapshot.moments), folder / "optimizer.safetensors")
        safetensors.torch.save_file(dict(snapshot.random_states), folder / "random.safetensors")
        write_manifest(folder)
        if root.is_local:
            _sync(folder)
        check()
        root.upload(folder, name)
    before_marker()
    check()
    if not root.put_if_absent(f"{name}/{MARKER}", encode_record(info)):
        raise NameTakenError(f"{root.url}/{name} exists with other content: another trainer uses this attempt")


def load_checkpoint(root: Root, info: CheckpointInfo, model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Load a checkpoint into a sharded model, its optimizer and the random generators.

    Every rank must call it; there may be more or fewer ranks than wrote it. A rank that the checkpoint does not contain
    keeps its generators. Raises, on every rank, SchemaError for a file that does not match its digest, ModelError for
    one that can't be read or does not fit the model.
    """
    # An optimizer that never stepped creates its moments when they are read, but only if there are no gradients.
    optimizer.zero_grad()
    wanted_moments = _shapes(split_moments(_moments(model, optimizer)))
    wanted_weights = _shapes(_saved(model))
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = {}

    weights_file = ADAPTER_WEIGHTS if has_adapters(model) else "model.safetensors"

    def read() -> bytes:
        where = f"{root.url}/{folder_of(info)}"
        with root.scratch_folder() as folder:
            root.download(folder_of(info), folder)
            check_copy(folder, where)
            weights.update(_read_weights(folder, model, where))
            moments.update(from_file(_read_tensors(folder / "optimizer.safetensors", where), wanted_moments))
            _check_fit(_shapes(weights), wanted_weights, f"{where}/{weights_file}")
            _check_fit(_shapes(moments), wanted_moments, f"{where}/optimizer.safetensors")
            _read_tensors(folder / "random.safetensors", where)  # checked here, before anything is changed
            return (folder / "random.safetensors").read_bytes()

    random_states = bytes_from_main(read)
    # With adapters, the other weights are those of the run's first model and are already loaded.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=not has_adapters(model))
    set_model_state_dict(model, weights, options=options)
    _set_moments(model, optimizer, moments)
    _set_random_states(safetensors.torch.load(random_states))


def _sync(folder: Path) -> None:
    """Sync the files to disk: the marker is synced when written, and must not survive a power cut without its files."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _moments(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by name, such as state.model.norm.weight.exp_avg; on each rank its shards."""
    return {k: v for k, v in _flat_state(model, optimizer).items() if k.startswith("state.")}


def _flat_state(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors on the CPU of rank 0, one after the other, and nothing on other ranks."""
    found = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_main():
            found[name] = whole.cpu()
    return found


def _set_moments(model: PreTrainedModel, optimizer: Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Send every rank its shards of rank 0's whole tensors. The optimizer keeps its settings."""
    state = _flat_state(model, optimizer)
    wanted = split_moments({name: tensor for name, tensor in state.items() if name.startswith("state.")})
    loaded: dict[str, Any] = {name: from_main(moments.get(name), like=wanted[name]) for name in sorted(wanted)}
    set_quantized(state, loaded)
    loaded = {name: tensor for name, tensor in loaded.items() if name in state}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, {**state, **loaded}, options=options)


def _saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's tensors that a checkpoint holds: all, or only those of adapters."""
    state, adapters_only = model.state_dict(), has_adapters(model)
    return {name: tensor for name, tensor in state.items() if is_adapter_weight(name) or not adapters_only}


def _read_weights(folder: Path, model: PreTrainedModel, where: str) -> dict[str, Tensor]:
    """Return whole tensors by their names in the model.

    Raises ModelError if only one of model and checkpoint has adapters, or if the files can't be read.
    """
    holds_adapter = (folder / ADAPTER_CONFIG).exists()
    if holds_adapter != has_adapters(model):
        found, wanted = ("an adapter", "whole weights") if holds_adapter else ("whole weights", "an adapter")
        raise ModelError(
            f"{where} holds {found}, lora_rank needs {wanted}; continue with the lora_rank of its first attempt"
        )
    if holds_adapter:
        return load_adapter(model, folder, where)
    try:
        return load_model(str(folder), dtype=model.dtype, strict=True).state_dict()
    except ModelError as error:
        raise ModelError(str(error).replace(str(folder), where)) from error


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes, also for sharded tensors."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_fit(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ModelError(
                f"{where}: {name} is {found.get(name, 'missing')}, the model's is {wanted.get(name, 'missing')}; "
                "resume with the model that wrote this checkpoint"
            )


def _read_tensors(path: Path, where: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{where}/{path.name} can't be read: {error}; delete that folder to resume from an older checkpoint"
        ) from error


def _gather_random_states() -> dict[str, Tensor]:
    """Return the generator states of all ranks, uint8, as cpu.RANK and cuda.RANK."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    gathered: dict[str, Tensor] = {}
    for device, state in states.items():
        of_ranks = [torch.empty_like(state) for _ in range(num_ranks())]
        dist.all_gather(of_ranks, state)
        gathered |= {f"{device}.{r}": of_rank for r, of_rank in enumerate(of_ranks)}
    return gathered


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    if f"cpu.{rank()}" in states:
        torch.set_rng_state(states[f"cpu.{rank()}"])
    if f"cuda.{rank()}" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[f"cuda.{rank()}"])
