"""digests.json: the digest of each file of a folder of weights, put before the marker that completes the folder.

Written into policies/version=V/ and checkpoints/attempt=A/step=S/. A folder without digests.json, from an older ludic,
is read unchecked. policy.json and checkpoint.json are put separately and hold their own digests
(ludic.store.records).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_64

from ludic.errors import SchemaError
from ludic.store.records import decode_json, encode_json, read_record
from ludic.store.root import Root

MANIFEST = "digests.json"

_BLOCK_BYTES = 8 << 20
_CONCURRENT_READS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    files: dict[str, str]


def write_manifest(folder: Path) -> dict[str, str]:
    """Write digests.json into a local folder, which must not change before its upload; returns the digests by file."""
    files = {_relative(file, folder): _digest(file.open("rb")) for file in sorted(folder.rglob("*")) if file.is_file()}
    (folder / MANIFEST).write_bytes(encode_json({"files": files}))
    return files


def read_manifest(root: Root, name: str) -> dict[str, str] | None:
    """Return the digests of a root's folder, by file; None if it has none. Raises SchemaError if they are damaged."""
    manifest = read_record(root, f"{name}/{MANIFEST}", _Manifest, "list of digests")
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
            wanted = dict(decode_json(file.read())["files"])
    except (ValueError, KeyError, TypeError) as error:
        yield MANIFEST, f"can't be read: {error}"
        return
    # A folder without config.json does not count, so its readers report that file.
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
