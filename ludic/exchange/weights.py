"""A Hugging Face folder of a run's weights: those of a step's checkpoint, or of a published policy version.

Reads checkpoints/ or policies/, and the tokenizer of the run's model; writes a local folder or one on any fsspec
filesystem. A LoRA adapter is merged into the run's model. A local folder appears whole. Elsewhere config.json comes
last, without which nothing loads the rest; an export that was cut short is finished by the same call. Nothing is
overwritten. Raises ConfigError for a step or a version that is not there, naming those that are, and for a target that
exists; ModelError for a model that an adapter does not fit; StoreError where a filesystem fails.
"""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ludic.errors import ConfigError
from ludic.inference.adapters import merge_adapter
from ludic.store import Root
from ludic.store.attempts import newest_attempt_id
from ludic.store.checkpoints import MARKER, checkpoint_folder, checkpoint_places, place_to_resume
from ludic.store.filesystem import Storage
from ludic.store.manifest import MANIFEST, check_folder
from ludic.store.policies import policy_folder, stored_versions
from ludic.training.first_model import first_model, first_tokenizer, write_files
from ludic.training.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ludic.training.model import full_state_dict, load_model, save_weights

_OURS = (MARKER, MANIFEST, "policy.json", "optimizer.safetensors", "random.safetensors")
_MOST_NAMED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport:
    """What was exported."""

    location: str
    source: str
    """Folder below the root."""
    num_files: int
    size_bytes: int


def export_weights(
    root: Root, target: str, *, step: int | None = None, version: int | None = None, model: str | None = None
) -> WeightsReport:
    """Write the folder `target`, a path or a URL; of the newest version where neither step nor version is given.

    step: of a checkpoint; where several attempts have one, that which the run stands on, else the newest.
    """
    assert step is None or version is None
    source = _policy_folder(root, version) if step is None else _checkpoint_folder(root, step)
    storage = Storage.at(target)
    _refuse_to_overwrite(storage)
    with _staging_folder(storage) as staged:
        folder = Path(staged, "weights")
        _download(root, source, folder)
        if (folder / ADAPTER_CONFIG).exists():
            with first_model(root, model) as base:
                _merge_adapter(base, folder, f"{root.url}/{source}")
        write_files(first_tokenizer(root), folder)
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
        _publish(folder, storage)
    return WeightsReport(location=storage.url, source=source, num_files=len(sizes), size_bytes=sum(sizes))


def _download(root: Root, source: str, folder: Path) -> None:
    """A trainer that prunes deletes what makes a folder complete before the weights: if it is there yet, all was."""
    with suppress(FileNotFoundError):
        check_folder(root, source)
        root.download(source, folder, leave_out=_OURS)
        if root.exists(f"{source}/{MARKER if source.startswith('checkpoints/') else 'config.json'}"):
            return
    raise ConfigError(f"{root.url}/{source} was deleted while it was copied; export a newer one")


def _merge_adapter(model: Path, folder: Path, where: str) -> None:
    """Put whole weights in the place of a LoRA adapter of `model`, so that whoever loads them need not know of it."""
    merged = merge_adapter(load_model(str(model)), str(folder), where=where)
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (folder / file).unlink()
    save_weights(merged, full_state_dict(merged), folder)


def _checkpoint_folder(root: Root, step: int) -> str:
    places = checkpoint_places(root)
    fitting = [place for place in places if place[1] == step]
    if not fitting:
        raise ConfigError(
            f"{root.url} has no checkpoint of step {step}; there are {_named('step', sorted({s for _, s in places}))}"
        )
    return checkpoint_folder(place_to_resume(root, newest_attempt_id(root), fitting) or fitting[-1])


def _policy_folder(root: Root, version: int | None) -> str:
    versions = stored_versions(root)
    if version is None and versions:
        version = versions[-1]
    if version not in versions:
        raise ConfigError(
            f"{root.url} has no weights of {'any version' if version is None else f'version {version}'}; "
            f"there are {_named('version', versions)}"
        )
    assert version is not None
    return policy_folder(version)


def _named(noun: str, numbers: Sequence[int]) -> str:
    """The newest of them in words."""
    if not numbers:
        return f"no {noun}s"
    older = f" and {len(numbers) - _MOST_NAMED} older ones" if len(numbers) > _MOST_NAMED else ""
    return f"{noun}s {', '.join(map(str, numbers[-_MOST_NAMED:]))}{older}"


def _refuse_to_overwrite(storage: Storage) -> None:
    is_taken = Path(storage.path).exists() if storage.is_local else storage.exists("config.json")
    if is_taken:
        raise ConfigError(f"{storage.url} exists; choose another --out, or delete it")


def _staging_folder(storage: Storage) -> tempfile.TemporaryDirectory[str]:
    """On the disk of a local target, so that its folder can be moved there at once."""
    if not storage.is_local:
        return tempfile.TemporaryDirectory(prefix="ludic-export-")
    parent = Path(storage.path).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".ludic-export-", dir=parent)
    except OSError as error:
        raise ConfigError(f"{storage.url} can't be written: {error.strerror or error}") from error


def _publish(folder: Path, storage: Storage) -> None:
    if storage.is_local:
        try:
            folder.rename(storage.path)
        except OSError as error:  # somebody made one meanwhile
            raise ConfigError(f"{storage.url} can't be made: {error.strerror or error}") from error
        return
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.name == "config.json")
    for file in files:
        name = file.relative_to(folder).as_posix()
        if not storage.put_file_if_absent(file, name):
            raise ConfigError(f"{storage.url}/{name} exists with other content; choose another --out, or delete it")
