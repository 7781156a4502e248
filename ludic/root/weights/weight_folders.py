"""Check folders of weights by digests, encode differences between two versions, and keep the run's first model."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64

from ludic.errors import ModelError, SchemaError
from ludic.root.catalogue import IDENTITY, MODEL, FileName
from ludic.root.json_records import Manifest, ModelIdentity, decode_record, encode_json, encode_record, read_record
from ludic.root.root import Root

# --- digests.json ---------------------------------------------------------------------------------------------
# digests.json: the digest of each file of a folder of weights, put before the marker that completes the folder.
#
# Written into policies/version=V/ and checkpoints/attempt=A/step=S/. A folder without digests.json, from an older
# ludic, is read unchecked. policy.json and checkpoint.json are put separately and hold their own digests.


MANIFEST = "digests.json"

_BLOCK_BYTES = 8 << 20
_CONCURRENT_READS = 4


def write_manifest(folder: Path) -> dict[str, str]:
    """Write digests.json into a local folder, which must not change before its upload; returns the digests by file."""
    files = {_relative(file, folder): _digest(file.open("rb")) for file in sorted(folder.rglob("*")) if file.is_file()}
    (folder / MANIFEST).write_bytes(encode_json({"files": files}))
    return files


def read_manifest(root: Root, name: str) -> dict[str, str] | None:
    """Return the digests of a root's folder, by file; None if it has none. Raises SchemaError if they are damaged."""
    manifest = read_record(root, f"{name}/{MANIFEST}", Manifest, "list of digests")
    return manifest.files if manifest else None


def check_copy(folder: Path, where: str) -> None:
    """Check the digests of a local copy of the folder `where`. Raises SchemaError, naming the first bad file."""
    names = {_relative(file, folder) for file in folder.rglob("*") if file.is_file()}
    if MANIFEST in names:
        _raise_first(where, _problems(lambda name: (folder / name).open("rb"), names))


def check_folder(root: Root, name: str) -> None:
    """Check the digests of a folder of a root, reading all its files.

    Raises SchemaError, naming the first bad file, and FileNotFoundError if a file vanishes during the check.
    """
    _raise_first(f"{root.url}/{name}", folder_problems(root, name))


def folder_problems(root: Root, name: str) -> Iterator[tuple[str, str]]:
    """Find files of a root's folder that differ from its digests.json: name and problem of each."""
    names = {file.removeprefix(f"{name}/") for file in root.list(name)}
    if MANIFEST in names:
        yield from _problems(lambda file: root.open_file(f"{name}/{file}"), names)


def _problems(open_file: Callable[[str], BinaryIO], names: set[str]) -> Iterator[tuple[str, str]]:
    """Find files that differ from the manifest: name and problem of each.

    names: the files that exist, below the folder; files that only the manifest names are never opened.
    """
    try:
        with open_file(MANIFEST) as file:
            wanted = decode_record(file.read(), Manifest).files
    except ValueError as error:
        yield MANIFEST, f"can't be read: {error}"
        return
    # A folder without config.json is not valid, so its readers report that file.
    for name in sorted(wanted.keys() - names - {"config.json"}):
        yield name, f"is missing, though {MANIFEST} lists it"
    known = sorted(names & wanted.keys())
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for name, found in zip(known, pool.map(lambda name: _digest(open_file(name)), known), strict=True):
            if found != wanted[name]:
                yield name, f"does not match its digest in {MANIFEST}, so a disk, a copy or a person has changed it"


def _raise_first(where: str, problems: Iterator[tuple[str, str]]) -> None:
    for name, problem in problems:
        raise SchemaError(f"{where}/{name} {problem}; put a sound copy in its place")


def _digest(file: BinaryIO) -> str:
    return f"xxh3_64:{digest_file(file, xxh3_64())}"


def digest_file(file: BinaryIO, digest: Any) -> str:
    """Read a file in large blocks, since each may be a request, and return its digest in hexadecimal; closes it."""
    with file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


# --- Differences ----------------------------------------------------------------------------------------------
# Differences between two safetensors files with the same tensors: lossless for every dtype, small if few words change.
#
# A difference is an Arrow IPC stream with a row for each changed segment of the file, at most 4 Mi words of one size (2
# bytes for bfloat16 and float16, 4 for float32). A row holds the gaps between the changed words and the words'
# differences as integers, both as byte planes compressed by zstd. At a small learning rate most changed bfloat16
# weights move by one unit in the last place, so a changed weight takes little more than a byte. A segment in which more
# than a quarter of the words change holds the differences of all its words and no gaps.


_WORD_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
}
"""Bytes of a word by safetensors dtype; other dtypes are compared byte by byte."""
_SEGMENT_WORDS = 1 << 22
"""Maximum words of a segment, so that memory stays bounded for any size of tensor."""
_DENSE_SHARE = 0.25
"""Share of changed words from which gaps cost more than the zeros between them."""
_GAP_BYTES = 4
_MOST_HEADER_BYTES = 100_000_000
"""Maximum header length in the safetensors format."""

_SCHEMA = pa.schema(
    [
        pa.field("start", pa.int64(), nullable=False),  # first byte of the segment in the file
        pa.field("word_bytes", pa.int8(), nullable=False),
        pa.field("num_words", pa.int64(), nullable=False),
        pa.field("num_changed", pa.int64(), nullable=False),
        pa.field("gaps", pa.large_binary()),  # unchanged words before each changed word; null: all words follow
        pa.field("differences", pa.large_binary(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Words of one size in a file."""

    start: int
    word_bytes: int
    num_words: int


def write_delta(old: Path, new: Path, target: Path) -> None:
    """Write to `target` the difference that turns the file `old` into `new`.

    Raises ValueError if the files do not hold the same tensors: names, dtypes, shapes and order.
    """
    with old.open("rb") as before, new.open("rb") as after:
        header = _read_header(before)
        if _read_header(after) != header:
            raise ValueError(f"{new.name} holds other tensors than before")
        with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as stream:
            for segment in _segments(header):
                row = _encode(segment, _read_words(before, segment), _read_words(after, segment))
                if row is not None:
                    stream.write_batch(pa.RecordBatch.from_pylist([row], schema=_SCHEMA))
        if before.read(1) or after.read(1):
            raise ValueError(f"{new.name} is longer than its header says")


def apply_delta(delta: Path, file: Path) -> None:
    """Turn `file`, in place, from the old version into the new one.

    Raises ValueError if the difference is damaged or does not fit the file. Check the result by its digest: a
    difference also applies to other content of the same length.
    """
    with file.open("r+b") as target, pa.OSFile(str(delta)) as source, pa.ipc.open_stream(source) as stream:
        if stream.schema != _SCHEMA:
            raise ValueError("its columns are not those of a difference")
        for batch in stream:
            batch.validate(full=True)
            for row in batch.to_pylist():
                _apply(row, target)


def _read_header(file: BinaryIO) -> bytes:
    """Return the header of a safetensors file with its length, and leave the file at the first tensor."""
    length = file.read(8)
    header = file.read(min(int.from_bytes(length, "little"), _MOST_HEADER_BYTES))
    return length + header


def _segments(header: bytes) -> Iterator[_Segment]:
    """Yield the segments of a file in order; together they cover all tensors. Raises ValueError for a damaged header.

    Neighbouring tensors with words of one size are joined, so a small tensor costs no row of its own.
    """
    tensors = [tensor for name, tensor in json.loads(header[8:]).items() if name != "__metadata__"]
    runs: list[list[int]] = []
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor["data_offsets"]):
        start, stop = tensor["data_offsets"]
        size = _WORD_BYTES.get(tensor["dtype"], 1)
        if start != end or (stop - start) % size:
            raise ValueError(f"a tensor takes bytes {start:,} to {stop:,}, the one before ends at byte {end:,}")
        if runs and runs[-1][0] == size:
            runs[-1][2] = stop
        else:
            runs.append([size, start, stop])
        end = stop
    for size, start, stop in runs:
        for first in range(start, stop, size * _SEGMENT_WORDS):
            yield _Segment(len(header) + first, size, (min(stop, first + size * _SEGMENT_WORDS) - first) // size)


def _read_words(file: BinaryIO, segment: _Segment) -> np.ndarray:
    """Return the words of a segment, (num_words,) unsigned. Raises ValueError if the file ends before."""
    file.seek(segment.start)
    words = np.frombuffer(file.read(segment.num_words * segment.word_bytes), f"<u{segment.word_bytes}")
    if len(words) != segment.num_words:
        raise ValueError(f"the file ends after {len(words):,} of {segment.num_words:,} words at byte {segment.start:,}")
    return words


def _encode(segment: _Segment, old: np.ndarray, new: np.ndarray) -> dict[str, Any] | None:
    """Return the row of a segment; None if nothing changed."""
    positions = np.flatnonzero(old != new)
    if not len(positions):
        return None
    is_dense = len(positions) > _DENSE_SHARE * len(new)
    differences = new - old if is_dense else new[positions] - old[positions]
    return {
        "start": segment.start,
        "word_bytes": segment.word_bytes,
        "num_words": segment.num_words,
        "num_changed": len(differences),
        "gaps": None if is_dense else _pack((np.diff(positions, prepend=-1) - 1).astype("<u4")),
        "differences": _pack(_zigzag(differences)),
    }


def _apply(row: dict[str, Any], file: BinaryIO) -> None:
    segment = _Segment(row["start"], row["word_bytes"], row["num_words"])
    num_changed = row["num_changed"]
    if segment.word_bytes not in (1, 2, 4, 8) or not 0 <= num_changed <= segment.num_words <= _SEGMENT_WORDS:
        raise ValueError(f"its segment at byte {segment.start:,} has impossible sizes")
    words = _read_words(file, segment).copy()
    differences = _unzigzag(_unpack(row["differences"], num_changed, segment.word_bytes))
    if row["gaps"] is None:
        positions = np.arange(num_changed)
    else:
        positions = np.cumsum(_unpack(row["gaps"], num_changed, _GAP_BYTES).astype(np.int64) + 1) - 1
    if num_changed and positions[-1] >= segment.num_words:
        raise ValueError(f"it changes a word beyond the end of the segment at byte {segment.start:,}")
    words[positions] += differences
    file.seek(segment.start)
    file.write(words.tobytes())


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """Map two's-complement words 0, -1, 1, -2, ... to 0, 1, 2, 3, ...: small differences get zero high bytes."""
    sign_bits = 8 * differences.itemsize - 1
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> sign_bits)).view(differences.dtype)


def _unzigzag(words: np.ndarray) -> np.ndarray:
    one = words.dtype.type(1)
    return (words >> one) ^ (~(words & one) + one)


def _pack(words: np.ndarray) -> bytes:
    """Compress words as byte planes: first the lowest byte of each word, then the next."""
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize).T
    return pa.compress(np.ascontiguousarray(planes), codec="zstd", asbytes=True)


def _unpack(data: bytes, num_words: int, word_bytes: int) -> np.ndarray:
    """Return (num_words,) unsigned words. Raises ValueError if the data does not hold this number of words."""
    try:
        planes = pa.decompress(data, num_words * word_bytes, codec="zstd", asbytes=True)
    except OSError as error:  # pyarrow's error from a codec
        raise ValueError(f"its words can't be decompressed: {error}") from error
    by_word = np.frombuffer(planes, np.uint8).reshape(word_bytes, num_words).T
    return np.ascontiguousarray(by_word).reshape(-1).view(f"<u{word_bytes}")


# --- model/ ---------------------------------------------------------------------------------------------------
# model/: configuration, tokenizer and identity of a run's model, so that a run continues without the model's folder.
#
# model/config.json, generation_config.json, tokenizer files   copies, put if absent
# model/*.safetensors                                          the first weights, if the model was made with the run
# model/identity.json                                          ModelIdentity; put last, and completes the folder
#
# run.json keeps the model's name as typed. Any folder with the same fingerprints may replace it.
# Raises SchemaError if identity.json can't be read, ModelError if a folder holds no model or another model.


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
_SHA256 = re.compile(r"[0-9a-f]{64}")


def identify(
    folder: Path, source: str, *, at: str | None = None, revision: str | None = None, with_weights: bool = True
) -> ModelIdentity:
    """Return the identity of the model in a local folder, reading each file once. at: ModelIdentity.folder.

    with_weights: if False, weights may be missing and are not read, and the identity has none.
    """
    weights = weight_files(folder) if with_weights else []
    if (with_weights and not weights) or not (folder / "config.json").is_file():
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
        return dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(file: Path) -> str:
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


def copy_snapshot(source: Root, target: Root) -> None:
    """Copy the kept model of `source` to `target`, which has the same model; does nothing if `source` keeps none."""
    identity = read_identity(source)
    if identity is None:
        return
    with target.scratch_folder() as folder:
        source.download(MODEL.folder, folder, leave_out=[IDENTITY.file])
        keep_model(target, folder, identity, with_weights=set(identity.weights) <= set(snapshot_files(source)))


def check_same(root: Root, found: ModelIdentity) -> None:
    """Raise ModelError, naming the differences, if `found` is not the model that the run began with."""
    kept = read_identity(root)
    differences = kept.differences(found) if kept else ""
    if differences:
        assert kept is not None
        raise ModelError(
            f"{found.source} is not the model that {root.url} began with ({kept.source}): {differences}; "
            "give the same model, or start another root"
        )


def snapshot_files(root: Root) -> Iterator[str]:
    """Return the names of the files in model/ except identity.json, without the folder."""
    return (found.file for found in MODEL.listed(root) if found.file != IDENTITY.file)


def read_snapshot(root: Root, names: Mapping[str, str]) -> dict[str, bytes]:
    """Return the content of kept files by name. Raises ModelError if a file is damaged or missing.

    names: SHA-256 by name, such as `identity.tokenizer`.
    """
    found = {name: root.read(MODEL.name(FileName(name))) for name in snapshot_files(root) if name in names}
    for name, digest in names.items():
        if name not in found or hashlib.sha256(found[name]).hexdigest() != digest:
            problem = "damaged" if name in found else "missing"
            raise ModelError(
                f"{root.url}/{MODEL.name(FileName(name))} is {problem}; delete {IDENTITY.template} and that file, and "
                "start where the model is"
            )
    return found
