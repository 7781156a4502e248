"""Export a run's weights as a Hugging Face folder, from a step's checkpoint or a published policy version.

Reads checkpoints/ or policies/, and the tokenizer of the run's model; writes a folder on the local disk or any fsspec
filesystem. A LoRA adapter is merged into the run's model. A local folder appears whole. On other filesystems
config.json comes last, and no loader accepts a folder without it; the same call finishes an interrupted export. Nothing
is overwritten. Raises ConfigError if the step or version does not exist, naming those that do, or if the target exists;
ModelError if an adapter does not fit the model; StoreError if a filesystem fails.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ludic.adapters.exports.targets import given_url
from ludic.base import ADAPTER_CONFIG, Part, Result, check_model_folder, plural, size, temporary_folder
from ludic.errors import ConfigError
from ludic.models import ADAPTER_WEIGHTS, merge_adapter
from ludic.root import (
    MARKER,
    POLICIES,
    Root,
    checkpoint_folder,
    checkpoint_id_to_resume,
    checkpoint_ids,
    newest_attempt_id,
)
from ludic.root.storage import Storage, follow_umask
from ludic.root.weights import (
    MANIFEST,
    check_folder,
    copy_policy,
    first_model,
    first_tokenizer,
    has_weights,
    policy_folder,
    stored_versions,
    write_files,
)
from ludic.training import full_state_dict, load_model, save_weights

_OURS = (MARKER, MANIFEST, POLICIES.file, "optimizer.safetensors", "random.safetensors")
_MOST_NAMED = 12


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WeightsReport(Result):
    """Result of an export of weights."""

    location: str
    source: str
    """Folder below the root from which the weights were exported."""
    num_files: int
    size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {"format": "hf", **asdict(self)}

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        yield f"{self.location}: {self.source} as {plural(self.num_files, 'file')}, {size(self.size_bytes)}"


def hf(
    root: Root, target: str | BinaryIO | None, *, step: int | None, version: int | None, model: str | None
) -> WeightsReport:
    """The exporter of weights. target: folder or URL to write."""
    return export_weights(root, given_url(target, "hf"), step=step, version=version, model=model)


def export_weights(
    root: Root, target: str, *, step: int | None = None, version: int | None = None, model: str | None = None
) -> WeightsReport:
    """Export weights to the folder `target`, a path or a URL; the newest version if step and version are both None.

    step: step of a checkpoint. If several attempts have one, the checkpoint on the chain of the newest attempt is used,
    else the newest.
    model: passed to `first_model` to find the run's model, into which an adapter is merged.
    """
    assert step is None or version is None
    if step is None:
        version = _find_version(root, version)
        source = policy_folder(version)
    else:
        source = _checkpoint_folder(root, step)
    storage = Storage.connect(target)
    is_taken = Path(storage.path).exists() if storage.is_local else storage.exists("config.json")
    if is_taken:
        raise ConfigError(f"{storage.url} exists; choose another target, or delete it")
    with _staging_folder(storage) as staged:
        folder = staged / "weights"
        with _refusing_deleted(root, source):
            if version is not None:
                _download_policy(root, version, folder)
            else:
                _download_checkpoint(root, source, folder)
        check_model_folder(folder)
        if (folder / ADAPTER_CONFIG).exists():
            with first_model(root, model) as base:
                _merge_adapter(base, folder, f"{root.url}/{source}")
        write_files(first_tokenizer(root), folder)
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
        _publish(folder, storage)
    return WeightsReport(location=storage.url, source=source, num_files=len(sizes), size_bytes=sum(sizes))


def _download_policy(root: Root, version: int, folder: Path) -> None:
    """Copy a policy to a local folder. Raises FileNotFoundError if a trainer deletes it during the copy.

    A trainer that prunes deletes the file that completes a folder before model*.safetensors: if that file still exists
    after the copy, the weights were whole.
    """
    copy_policy(root, version, folder)
    for name in _OURS:
        (folder / name).unlink(missing_ok=True)
    if not has_weights(root, version):
        raise FileNotFoundError(policy_folder(version))


def _download_checkpoint(root: Root, source: str, folder: Path) -> None:
    """Copy the weights of a checkpoint to a local folder; see _download_policy."""
    check_folder(root, source)
    root.download(source, folder, leave_out=_OURS)
    if not root.exists(f"{source}/{MARKER}"):
        raise FileNotFoundError(source)


@contextmanager
def _refusing_deleted(root: Root, source: str) -> Iterator[None]:
    """Raise ConfigError instead of FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{root.url}/{source} was deleted while it was copied; export a newer one") from None


def _merge_adapter(model: Path, folder: Path, where: str) -> None:
    """Replace a LoRA adapter of `model` by merged whole weights, which any program can load without the adapter."""
    merged = merge_adapter(load_model(str(model)), str(folder), where=where)
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (folder / file).unlink()
    save_weights(merged, full_state_dict(merged), folder)


def _checkpoint_folder(root: Root, step: int) -> str:
    found = checkpoint_ids(root)
    fitting = [checkpoint_id for checkpoint_id in found if checkpoint_id[1] == step]
    if not fitting:
        raise ConfigError(
            f"{root.url} has no checkpoint of step {step}; there are {_named('step', sorted({s for _, s in found}))}"
        )
    return checkpoint_folder(checkpoint_id_to_resume(root, newest_attempt_id(root), fitting) or fitting[-1])


def _find_version(root: Root, version: int | None) -> int:
    """Return the version to export, by default the newest. Raises ConfigError if it has no weights."""
    versions = stored_versions(root)
    if version is None and versions:
        version = versions[-1]
    if version not in versions:
        raise ConfigError(
            f"{root.url} has no weights of {'any version' if version is None else f'version {version}'}; "
            f"there are {_named('version', versions)}"
        )
    assert version is not None
    return version


def _named(noun: str, numbers: Sequence[int]) -> str:
    """Return the newest numbers as text, and how many older ones there are."""
    if not numbers:
        return f"no {noun}s"
    older = f" and {len(numbers) - _MOST_NAMED} older ones" if len(numbers) > _MOST_NAMED else ""
    return f"{noun}s {', '.join(map(str, numbers[-_MOST_NAMED:]))}{older}"


@contextmanager
def _staging_folder(storage: Storage) -> Iterator[Path]:
    """Give a temporary folder, on the same disk as a local target, so that a rename can move it there at once."""
    parent = Path(storage.path).parent if storage.is_local else None
    with ExitStack() as stack:
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(temporary_folder("export", beside=parent))
        except OSError as error:
            raise ConfigError(f"{storage.url} can't be written: {error.strerror or error}") from error
        yield folder


def _publish(folder: Path, storage: Storage) -> None:
    files = sorted((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.name == "config.json")
    if storage.is_local:
        try:
            for file in files:
                follow_umask(file)
            folder.rename(storage.path)
        except OSError as error:  # another process may have made the folder
            raise ConfigError(f"{storage.url} can't be made: {error.strerror or error}") from error
        return
    for file in files:
        name = file.relative_to(folder).as_posix()
        if not storage.put_file_if_absent(file, name):
            raise ConfigError(f"{storage.url}/{name} exists with other content; choose another target, or delete it")
