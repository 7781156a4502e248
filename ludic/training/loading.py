"""Load the trained model with its optimizer, and the reference model. Collective."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ludic.distributed import run_on_main
from ludic.errors import ConfigError
from ludic.models.first_model import first_config, first_model, local_folder
from ludic.models.lora import add_adapters
from ludic.paths import is_url
from ludic.store import Root
from ludic.training.config import TrainConfig
from ludic.training.model import compute_dtype, load_sharded
from ludic.training.optimizer import build_optimizer
from ludic.training.reference import CachedReference, Reference, base_reference, fingerprint, model_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstModel:
    """The run's first model, for all ranks."""

    root: Root
    given: str | None = None
    """Another location of the model than the one in run.json."""

    @contextmanager
    def weights(self) -> Iterator[str]:
        """Yield a folder with the first weights, which only rank 0 reads. Raises ModelError on every rank."""
        with _on_main(partial(first_model, self.root, self.given)) as folder:
            yield folder

    @contextmanager
    def config(self) -> Iterator[str]:
        """Yield a folder with the configuration, which only rank 0 reads."""
        with _on_main(partial(first_config, self.root)) as folder:
            yield folder

    def is_named(self, source: str) -> bool:
        """Return whether a folder, an id or a URL names this model."""
        names = (self.root.run.model, self.given)
        return source in names or any(_is_same_folder(source, name) for name in names if name is not None)


@contextmanager
def _on_main(find: Callable[[], AbstractContextManager[Path]]) -> Iterator[str]:
    with ExitStack() as stack:
        yield run_on_main(lambda: str(stack.enter_context(find())))


def load_trained(
    first: FirstModel, config: TrainConfig, mesh: DeviceMesh, *, with_weights: bool = True
) -> tuple[PreTrainedModel, Optimizer]:
    """Load, shard and prepare the trained model, and build its optimizer.

    with_weights: if false, the caller must load a checkpoint's weights next. With LoRA, weights are always loaded.
    """
    # Frozen weights need no more precision than the dtype that they are computed in.
    dtype = None if config.model.lora_rank is None else compute_dtype(config)
    with_weights = with_weights or config.model.lora_rank is not None
    with first.weights() if with_weights else first.config() as folder:
        model = load_sharded(
            folder,
            mesh,
            dtype=dtype or torch.float32,
            prepare=partial(
                _prepare, source=first.given or first.root.run.model, seed=first.root.run.seed, config=config
            ),
            with_weights=with_weights,
            compute_dtype=compute_dtype(config),
            activation_checkpointing=config.model.activation_checkpointing,
            compile_layers=config.model.compile,
            float32_head=first.root.run.float32_head,
        )
    return model, build_optimizer(model, config)


def _prepare(model: PreTrainedModel, source: str, seed: int, config: TrainConfig) -> None:
    if config.model.lora_rank is not None:
        add_adapters(
            model,
            source=source,
            rank=config.model.lora_rank,
            alpha=config.model.lora_alpha,
            targets=config.model.lora_targets,
            seed=seed,
        )


def load_reference(
    first: FirstModel, config: TrainConfig, mesh: DeviceMesh, model: PreTrainedModel
) -> Reference | None:
    """Load the reference; returns None if there is none in the settings.

    model: the trained model; with its adapters off it can be the reference. Raises ConfigError if that model
    is to be off-loaded.
    """
    if config.loss.reference is None:
        return None
    device, dtype = torch.device(mesh.device_type), compute_dtype(config)
    if config.model.lora_rank is not None and first.is_named(config.loss.reference):
        if config.loss.reference_offload:
            raise ConfigError(
                "reference is the model that LoRA trains, which can't be off-loaded; leave it on the device"
            )
        make_reference = base_reference
    else:
        weights, offload = dtype or torch.float32, config.loss.reference_offload
        named = partial(local_folder, config.loss.reference)
        with first.weights() if first.is_named(config.loss.reference) else _on_main(named) as folder:
            model = load_sharded(
                folder,
                mesh,
                dtype=weights,
                compute_dtype=dtype,
                offload=offload,
                float32_head=first.root.run.float32_head,
            )
        make_reference = model_reference
    reference = make_reference(model, device, chunk_tokens=config.model.logprob_chunk_tokens)
    if not config.loss.reference_cache:
        return reference
    sources = [Root.open(url) for url in (*config.batch.sources, config.batch.replay_batches) if url is not None]
    name = fingerprint(model, dtype or torch.float32, float32_head=first.root.run.float32_head)
    return CachedReference(reference, first.root, name, device, sources)


def _is_same_folder(one: str, other: str) -> bool:
    if is_url(one) or is_url(other):
        return False
    folders = [Path(source).expanduser() for source in (one, other)]
    return all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1])
