"""model/: configuration, tokenizer and identity of a run's model, so that a run continues without the model's folder.

model/config.json, generation_config.json, tokenizer files   copies, put if absent
model/*.safetensors                                          the first weights, if the model was made with the run
model/identity.json                                          ModelIdentity; put last, and completes the folder

run.json keeps the model's name as typed. Any folder with the same fingerprints may replace it.
Raises SchemaError if identity.json can't be read, ModelError if a folder holds no model or another model.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ludic.errors import ModelError
from ludic.store.catalogue import IDENTITY, MODEL, FileName
from ludic.store.records import ModelIdentity, encode_record
from ludic.store.root import Root

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
    "*.model",
    "*.tiktoken",
)
WEIGHT_FILES = ("model*.safetensors*", "pytorch_model*")
"""Patterns of weight files, in order of preference; the first pattern with a match is used."""

_CONCURRENT_FILES = 8
_BLOCK_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def identify(folder: Path, source: str, *, at: str | None = None, revision: str | None = None) -> ModelIdentity:
    """Return the identity of the model in a local folder, reading each file once. at: ModelIdentity.folder."""
    weights = weight_files(folder)
    if not weights or not (folder / "config.json").is_file():
        missing = "weights (model.safetensors)" if (folder / "config.json").is_file() else "config.json"
        raise ModelError(f"{source}: {folder} holds no {missing}; wanted a Hugging Face folder of a model")
    return ModelIdentity(
        source=source,
        folder=at,
        revision=revision,
        config=_digests(folder, matching(folder, CONFIG_FILES)),
        tokenizer=_digests(folder, matching(folder, TOKENIZER_FILES)),
        weights=_digests(folder, weights),
    )


def matching(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the names of a folder's files that match one of the patterns, sorted."""
    files = (file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    return sorted({file.relative_to(folder).as_posix() for file in files})


def weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files to load: safetensors if there are any, else pickled tensors."""
    return next((names for pattern in WEIGHT_FILES if (names := matching(folder, [pattern]))), [])


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    with ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(folder / name), names), strict=True))


def _digest(file: Path) -> str:
    """Return the SHA-256 in hexadecimal. A snapshot of the Hub's cache links to large files named by their SHA-256."""
    blob = file.resolve()
    if file.is_symlink() and blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_identity(root: Root) -> ModelIdentity | None:
    """Return model/identity.json; None if the root keeps no model yet. Raises SchemaError if it can't be read."""
    return IDENTITY.read(root)


def keep_model(root: Root, folder: Path, identity: ModelIdentity, *, with_weights: bool = False) -> None:
    """Put a model's files, and last its identity; several starts may do so at the same time.

    with_weights: also put the weights, since no other folder keeps them; `folder` is then a scratch folder of the root.
    Raises ModelError if the root keeps another model.
    """
    # config.json last: a folder that has it is complete.
    names = [*identity.tokenizer, *(identity.weights if with_weights else ()), *sorted(identity.config, reverse=True)]
    taken = [
        name for name in names if not _put(root, folder / name, MODEL.name(FileName(name)), name in identity.weights)
    ]
    if taken:
        raise ModelError(
            f"{root.url}/{MODEL.folder} holds another {', '.join(taken)} than {identity.source}; "
            "delete that folder if no run has begun with it"
        )
    if not root.put_if_absent(IDENTITY.template, encode_record(identity)):
        check_same(root, identity)


def _put(root: Root, file: Path, name: str, is_large: bool) -> bool:
    return root.put_file_if_absent(file, name) if is_large else root.put_if_absent(name, file.read_bytes())


def copy_kept(source: Root, target: Root) -> None:
    """Copy the kept model of `source` to `target`, which has the same model; does nothing if `source` keeps none."""
    identity = read_identity(source)
    if identity is None:
        return
    with target.scratch_folder() as folder:
        source.download(MODEL.folder, folder, leave_out=[IDENTITY.file])
        keep_model(target, folder, identity, with_weights=set(identity.weights) <= set(kept_files(source)))


def check_same(root: Root, found: ModelIdentity) -> None:
    """Raises ModelError, naming the differences, if `found` is not the model that the run began with."""
    kept = read_identity(root)
    differences = kept.differences(found) if kept else ""
    if differences:
        assert kept is not None
        raise ModelError(
            f"{found.source} is not the model that {root.url} began with ({kept.source}): {differences}; "
            "give the same model, or start another root"
        )


def kept_files(root: Root) -> Iterator[str]:
    """Return the names of the files in model/ except identity.json, without the folder."""
    return (found.file for found in MODEL.listed(root) if found.file != IDENTITY.file)


def read_kept(root: Root, names: Mapping[str, str]) -> dict[str, bytes]:
    """Return the content of kept files by name. Raises ModelError if a file is damaged or missing.

    names: SHA-256 by name, such as `identity.tokenizer`.
    """
    found = {name: root.read(MODEL.name(FileName(name))) for name in kept_files(root) if name in names}
    for name, digest in names.items():
        if name not in found or hashlib.sha256(found[name]).hexdigest() != digest:
            problem = "damaged" if name in found else "missing"
            raise ModelError(
                f"{root.url}/{MODEL.name(FileName(name))} is {problem}; delete {IDENTITY.template} and that file, and "
                "start where the model is"
            )
    return found
