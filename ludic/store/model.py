"""model/: what a run's model is, so that the root is enough to go on without the folder that it came from.

model/config.json, generation_config.json, tokenizer files   copies, put if absent
model/*.safetensors                                          the first weights, of a run whose model was made with it
model/identity.json                                          ModelIdentity; put last, and what makes the others count

run.json keeps the model's name as typed. Any other place may stand in for it once its fingerprints are the same.
Raises SchemaError for an identity.json that can't be read, ModelError for a folder that holds no model or another one.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ludic.errors import ModelError, SchemaError
from ludic.store.json_files import decode_json, encode_json
from ludic.store.root import Root

MODEL = "model"
IDENTITY = f"{MODEL}/identity.json"
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
"""In the order in which they are looked for; the first kind that is there counts."""

_CONCURRENT_FILES = 8
_BLOCK_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The fingerprints of a run's first model: SHA-256 of each file, by its name in the model's folder."""

    source: str
    """Folder, Hugging Face id or URL, as typed."""
    folder: str | None = None
    """Where it was, an absolute path; None for a model from elsewhere."""
    revision: str | None = None
    """The commit of a model from the Hub."""
    config: Mapping[str, str]
    tokenizer: Mapping[str, str]
    weights: Mapping[str, str]

    def differences(self, other: "ModelIdentity") -> str:
        """Which files another model has otherwise, in a sentence; empty for the same model."""
        verbs = {"config": "differs", "tokenizer": "differs", "weights": "differ"}
        named = {kind: _differing(getattr(self, kind), getattr(other, kind)) for kind in verbs}
        return "; ".join(f"{kind} {verbs[kind]} ({', '.join(names)})" for kind, names in named.items() if names)


def _differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def identify(folder: Path, source: str, *, at: str | None = None, revision: str | None = None) -> ModelIdentity:
    """The identity of the model in a local folder, whose files are all read once; at: `ModelIdentity.folder`."""
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
    """Names of a folder's files, sorted."""
    files = (file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    return sorted({file.relative_to(folder).as_posix() for file in files})


def weight_files(folder: Path) -> list[str]:
    """Those that are loaded: safetensors, or else pickled tensors."""
    return next((names for pattern in WEIGHT_FILES if (names := matching(folder, [pattern]))), [])


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    with ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(folder / name), names), strict=True))


def _digest(file: Path) -> str:
    """SHA-256, hexadecimal. The Hub's cache has it in the name of a large file, which a snapshot links to."""
    blob = file.resolve()
    if file.is_symlink() and blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_identity(root: Root) -> ModelIdentity | None:
    """None for a root that keeps no model yet."""
    try:
        values = decode_json(root.read(IDENTITY))
        known = {field.name: values[field.name] for field in fields(ModelIdentity) if field.name in values}
        identity = ModelIdentity(**known)
        if not all(isinstance(getattr(identity, kind), dict) for kind in ("config", "tokenizer", "weights")):
            raise TypeError("config, tokenizer and weights must be objects")
        return identity
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SchemaError(
            f"{root.url}/{IDENTITY} does not identify a model: {error}; delete it, and start where the model is"
        ) from error


def keep_model(root: Root, folder: Path, identity: ModelIdentity, *, with_weights: bool = False) -> None:
    """Put a model's files, and last its identity, which several starts may do at once.

    with_weights: also the weights, from a scratch folder of the root, since nobody else keeps them.
    Raises ModelError where another model is kept.
    """
    # config.json last: a folder that has it is whole.
    names = [*identity.tokenizer, *(identity.weights if with_weights else ()), *sorted(identity.config, reverse=True)]
    taken = [name for name in names if not _put(root, folder / name, f"{MODEL}/{name}", name in identity.weights)]
    if taken:
        raise ModelError(
            f"{root.url}/{MODEL} holds another {', '.join(taken)} than {identity.source}; "
            "delete that folder if no run has begun with it"
        )
    if not root.put_if_absent(IDENTITY, encode_json(asdict(identity))):
        check_same(root, identity)


def _put(root: Root, file: Path, name: str, is_large: bool) -> bool:
    return root.put_file_if_absent(file, name) if is_large else root.put_if_absent(name, file.read_bytes())


def copy_kept(source: Root, target: Root) -> None:
    """Put what another root keeps of its model into one that has the same; nothing where it keeps none."""
    identity = read_identity(source)
    if identity is None:
        return
    with target.scratch_folder() as folder:
        source.download(MODEL, folder, leave_out=["identity.json"])
        keep_model(target, folder, identity, with_weights=set(identity.weights) <= set(kept_files(source)))


def check_same(root: Root, found: ModelIdentity) -> None:
    """Raises ModelError, naming what differs, for a model that is not the one that the run began with."""
    kept = read_identity(root)
    differences = kept.differences(found) if kept else ""
    if differences:
        assert kept is not None
        raise ModelError(
            f"{found.source} is not the model that {root.url} began with ({kept.source}): {differences}; "
            "give the same model, or start another root"
        )


def kept_files(root: Root) -> Iterator[str]:
    """Names of what model/ holds besides its identity, without the folder."""
    return (name.removeprefix(f"{MODEL}/") for name in root.list(MODEL) if name != IDENTITY)


def read_kept(root: Root, names: Mapping[str, str]) -> dict[str, bytes]:
    """The content of some kept files, such as `identity.tokenizer`. Raises ModelError for a damaged one."""
    found = {name: root.read(f"{MODEL}/{name}") for name in kept_files(root) if name in names}
    for name, digest in names.items():
        if name not in found or hashlib.sha256(found[name]).hexdigest() != digest:
            raise ModelError(
                f"{root.url}/{MODEL}/{name} is {'damaged' if name in found else 'missing'}; delete {IDENTITY} and that "
                "file, and start where the model is"
            )
    return found
