"""Checkpoints: trainer state on the root, complete or invisible. A run can resume on any number of ranks.

Writes checkpoints/attempt=A/step=S/:
    config.json, model*.safetensors*   weights, as a Hugging Face folder; with LoRA peft's adapter_config.json and
                                       adapter_model.safetensors, whose base is the run's model
    optimizer.safetensors              moments of each parameter; settings come from the config at resume
    random.safetensors                 generator states of each rank
    digests.json                       digests of these files
    checkpoint.json                    CheckpointInfo; put last, as the marker of a complete checkpoint

The trainer copies the state (`take_snapshot`); any thread of rank 0 writes it (`write_checkpoint`). Raises ModelError,
which names the tensor, if a checkpoint doesn't fit the model, before anything is changed.
"""

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

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
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ludic.errors import ModelError, NameTakenError, SchemaError
from ludic.inference.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ludic.store.attempts import Attempt, check_not_fenced, outdated
from ludic.store.checkpoints import MARKER, checkpoint_folder, checkpoint_places, place_to_resume
from ludic.store.json_files import decode_json, decode_record, encode_json
from ludic.store.manifest import MANIFEST, check_copy, check_folder, write_manifest
from ludic.store.root import Root
from ludic.training.distributed import from_main, num_ranks, rank, run_on_main
from ludic.training.lora import has_adapters, is_adapter_weight, load_adapter
from ludic.training.model import detached, full_state_dict, load_model, save_weights

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """Content of checkpoint.json."""

    attempt_id: int
    """Attempt (trainer start) that wrote the checkpoint."""
    step: int
    """Last gradient step in the weights."""
    policy_version: int
    """Newest version that the trainer had published."""
    cursor: Mapping[str, Any]
    """The reader's position after this step, as JSON values."""
    config: Mapping[str, Any]
    """The trainer's settings, as JSON values."""
    num_ranks: int
    """Number of ranks that wrote the checkpoint."""
    format_version: int = FORMAT_VERSION

    @property
    def name(self) -> str:
        """Folder of the checkpoint, relative to the root."""
        return checkpoint_folder((self.attempt_id, self.step))

    def to_json(self) -> bytes:
        return encode_json(asdict(self))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """Parse checkpoint.json. Raises SchemaError, which names `where`, if it is not one of this format version."""
        try:
            info = decode_record(data, cls)
        except ValueError as error:
            raise SchemaError(f"{where} is not a checkpoint.json that ludic can read: {error}") from error
        if info.format_version != FORMAT_VERSION:
            raise SchemaError(
                f"{where} has format {info.format_version}, this ludic reads {FORMAT_VERSION}; upgrade ludic"
            )
        return info


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
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
) -> Snapshot:
    """Copy the state of a checkpoint to the CPU of rank 0; every rank must call it."""
    info = CheckpointInfo(
        attempt_id=attempt_id,
        step=step,
        policy_version=policy_version,
        cursor=cursor,
        config=config,
        num_ranks=num_ranks(),
    )
    moments = _moments(model, optimizer, StateDictOptions(full_state_dict=True, cpu_offload=True))
    return Snapshot(
        info=info,
        model=model,
        weights=detached(full_state_dict(model, adapters_only=has_adapters(model)), model.device),
        moments=detached(moments, model.device),
        random_states=_gather_random_states(),
    )


def write_checkpoint(root: Root, snapshot: Snapshot, *, max_shard_size: str = "5GB") -> None:
    """Write a snapshot, its marker last; call it in any thread of rank 0. Raises StoreError or NameTakenError.

    max_shard_size: see `save_weights`.
    """
    info = snapshot.info
    with root.scratch_folder() as folder:
        save_weights(snapshot.model, snapshot.weights, folder, max_shard_size=max_shard_size)
        safetensors.torch.save_file(dict(snapshot.moments), folder / "optimizer.safetensors")
        safetensors.torch.save_file(dict(snapshot.random_states), folder / "random.safetensors")
        write_manifest(folder)
        if root.is_local:
            _sync(folder)
        root.upload(folder, info.name)
    if not root.put_if_absent(f"{info.name}/{MARKER}", info.to_json()):
        raise NameTakenError(f"{root.url}/{info.name} is there with other content; another trainer has this attempt")


def last_checkpoint(
    root: Root, attempt: Attempt | None, is_sound: Callable[[CheckpointInfo], bool] = lambda info: True
) -> CheckpointInfo | None:
    """Return the newest complete checkpoint on the chain of parents of an attempt; None if there is none.

    is_sound: checkpoints for which it is false are skipped. By default only markers are read.
    """
    if attempt is None:
        return None
    found = {(info.attempt_id, info.step): info for info in complete_checkpoints(root)}
    while (place := place_to_resume(root, attempt.attempt_id, found)) is not None:
        if is_sound(found[place]):
            return found[place]
        del found[place]
    return None


def checkpoint_to_resume(
    root: Root, attempt: Attempt | None, verdicts: MutableMapping[str, bool] | None = None
) -> CheckpointInfo | None:
    """The last checkpoint whose files match their digests; None to start from the first weights.

    One that does not match is passed over with a warning. verdicts: whether a checkpoint is sound, by name; one that
    is in there is not read again, others are added.
    """
    verdicts = {} if verdicts is None else verdicts

    def is_sound(info: CheckpointInfo) -> bool:
        if info.name not in verdicts:
            verdicts[info.name] = _is_sound(root, info)
        return verdicts[info.name]

    return last_checkpoint(root, attempt, is_sound)


def _is_sound(root: Root, info: CheckpointInfo) -> bool:
    try:
        check_folder(root, info.name)
    except FileNotFoundError:  # another trainer has pruned it in between
        return False
    except SchemaError as error:
        logger.warning("%s; the checkpoint is passed over", error)
        return False
    return True


def load_checkpoint(root: Root, info: CheckpointInfo, model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Load a checkpoint into a sharded model, its optimizer and the random generators.

    Every rank must call it; there may be more or fewer ranks than wrote it. A rank that the
    checkpoint knows nothing of keeps its generators. Raises, on every rank, SchemaError for a file that does not
    match its digest, ModelError for one that can't be read or does not fit the model.
    """
    # An optimizer that never stepped creates its moments when they are read, but only if there are no gradients.
    optimizer.zero_grad()
    wanted_moments = _shapes(_moments(model, optimizer, StateDictOptions()))
    wanted_weights = _shapes(_saved(model))
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = {}

    weights_file = ADAPTER_WEIGHTS if has_adapters(model) else "model.safetensors"

    def read() -> bytes:
        where = f"{root.url}/{info.name}"
        with root.scratch_folder() as folder:
            root.download(info.name, folder)
            check_copy(folder, where)
            weights.update(_read_weights(folder, model, where))
            moments.update(_read_tensors(folder / "optimizer.safetensors", where))
            _check_fit(_shapes(weights), wanted_weights, f"{where}/{weights_file}")
            _check_fit(_shapes(moments), wanted_moments, f"{where}/optimizer.safetensors")
            _read_tensors(folder / "random.safetensors", where)  # here, before anything is changed
            return (folder / "random.safetensors").read_bytes()

    random_states = run_on_main(read)
    # With adapters, the other weights are those of the run's first model and are already loaded.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=not has_adapters(model))
    set_model_state_dict(model, weights, options=options)
    _set_moments(model, optimizer, moments)
    _set_random_states(safetensors.torch.load(random_states))


def complete_checkpoints(root: Root) -> list[CheckpointInfo]:
    """Return checkpoints that have a marker, ordered by attempt and step. Raises SchemaError for a foreign marker."""
    found = [_read_marker(root, f"{checkpoint_folder(place)}/{MARKER}") for place in checkpoint_places(root)]
    return [info for info in found if info]


def _read_marker(root: Root, name: str) -> CheckpointInfo | None:
    """Read a marker; returns None if it was deleted since listing or is half-written, for example by a copying tool."""
    try:
        data = root.read(name)
        decode_json(data)
    except (FileNotFoundError, ValueError):
        return None
    return CheckpointInfo.from_json(data, f"{root.url}/{name}")


def prune_checkpoints(root: Root, attempt: Attempt, keep: int, *, every: int | None = None) -> list[str]:
    """Delete old and incomplete checkpoints; returns their names.

    Keeps the newest `keep` complete checkpoints, those whose step is a multiple of `every`, and incomplete ones of
    this attempt and later ones.

    Call it on rank 0, right after a checkpoint of `attempt`. Raises FencedError if a newer attempt owns the root:
    claims are read after that checkpoint is complete and before the first deletion, see ludic.store.attempts.
    """
    folders = {name.rpartition("/")[0] for name in root.list("checkpoints")}
    complete = {(info.attempt_id, info.step): info.name for info in complete_checkpoints(root)}
    # A fenced trainer may still complete such a checkpoint; then it is not on the chain.
    left_incomplete = {name for name in folders - set(complete.values()) if _attempt_of(name) < attempt.attempt_id}
    old = [complete[place] for place in outdated(complete, keep) if every is None or place[1] % every]
    old += sorted(left_incomplete)
    check_not_fenced(root, attempt)
    for name in old:
        # The marker first, so that a deletion cut short leaves nothing that counts; then what lists the other files.
        for first in (f"{name}/{MARKER}", f"{name}/{MANIFEST}", name):
            root.delete(first)
    return old


def _sync(folder: Path) -> None:
    """Sync the files to disk: the marker is synced when put, and must not survive a power cut without its files."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _attempt_of(folder: str) -> int:
    """Return the attempt id in the name of a checkpoint's folder."""
    return int(folder.split("/")[1].removeprefix("attempt="))


def _moments(model: PreTrainedModel, optimizer: Optimizer, options: StateDictOptions) -> dict[str, Tensor]:
    """Return the optimizer's tensors by name, such as state.model.norm.weight.exp_avg; whole if options say so."""
    return {k: v for k, v in _flat_state(model, optimizer, options).items() if k.startswith("state.")}


def _flat_state(model: PreTrainedModel, optimizer: Optimizer, options: StateDictOptions) -> dict[str, Any]:
    options.flatten_optimizer_state_dict = True
    return get_optimizer_state_dict(model, optimizer, options=options)


def _set_moments(model: PreTrainedModel, optimizer: Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Send every rank its shards of rank 0's whole tensors. The optimizer keeps its settings."""
    state = _flat_state(model, optimizer, StateDictOptions())
    names = sorted(name for name in state if name.startswith("state."))
    loaded: dict[str, Any] = {name: from_main(moments.get(name), like=state[name]) for name in names}
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
        raise ModelError(f"{where} holds {found}, lora_rank wants {wanted}; train on with the lora_rank it began with")
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
