"""The model that a run trains, with its optimizer, and the reference that it is measured against. Collective."""

from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ludic.errors import ConfigError
from ludic.store import Root
from ludic.training.config import TrainConfig
from ludic.training.lora import add_adapters
from ludic.training.model import compute_dtype, load_sharded
from ludic.training.optimizer import build_optimizer
from ludic.training.reference import CachedReference, Reference, base_reference, fingerprint, model_reference


def load_trained(root: Root, config: TrainConfig, mesh: DeviceMesh) -> tuple[PreTrainedModel, Optimizer]:
    # What does not train need not be more exact than what it computes in.
    dtype = None if config.lora_rank is None else compute_dtype(config)
    model = load_sharded(
        root.run.model,
        mesh,
        dtype=dtype or torch.float32,
        prepare=partial(_prepare, root=root, config=config),
        compute_dtype=compute_dtype(config),
        activation_checkpointing=config.activation_checkpointing,
        compile_layers=config.compile,
    )
    return model, build_optimizer(model, config)


def _prepare(model: PreTrainedModel, root: Root, config: TrainConfig) -> None:
    if config.lora_rank is not None:
        add_adapters(
            model,
            source=root.run.model,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            seed=root.run.seed,
        )


def load_reference(root: Root, config: TrainConfig, mesh: DeviceMesh, model: PreTrainedModel) -> Reference | None:
    """model: the one that trains, which is the reference as well where adapters come off."""
    if config.reference is None:
        return None
    device, dtype = torch.device(mesh.device_type), compute_dtype(config)
    if config.lora_rank is not None and _is_same_model(config.reference, root.run.model):
        if config.reference_offload:
            raise ConfigError(
                "reference is the model that LoRA trains, which can't be off-loaded; leave it on the device"
            )
        make_reference = base_reference
    else:
        weights, offload = dtype or torch.float32, config.reference_offload
        model = load_sharded(config.reference, mesh, dtype=weights, compute_dtype=dtype, offload=offload)
        make_reference = model_reference
    reference = make_reference(model, device, chunk_tokens=config.logprob_chunk_tokens)
    if not config.reference_cache:
        return reference
    sources = [Root.open(url) for url in (*config.sources, config.replay_batches) if url is not None]
    return CachedReference(reference, root, fingerprint(model, dtype or torch.float32), device, sources)


def _is_same_model(one: str, other: str) -> bool:
    folders = [Path(source).expanduser() for source in (one, other)]
    return one == other or (all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]))
