"""Files of a published version: a Hugging Face folder, or differences to an earlier version.

A folder policies/version=V/ with a config.json holds all files. A folder with a delta.json holds a NAME.delta for each
safetensors file that changed (ludic.store.weight_deltas); its other files are those of the version that delta.json
names as its base. The base may hold differences, too, so a chain of versions ends at a full one. delta.json also holds
the digest of every file of the whole version: a reader checks them before it gives the files to anyone.
"""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ludic.errors import SchemaError
from ludic.store.catalogue import DELTAS, POLICIES, WEIGHT_FILES, WEIGHTS, VersionName
from ludic.store.manifest import MANIFEST, check_copy, check_folder, read_manifest, write_manifest
from ludic.store.records import Delta
from ludic.store.root import Root
from ludic.store.weight_deltas import apply_delta

DELTA_SUFFIX = ".delta"


def policy_folder(version: int) -> str:
    return WEIGHT_FILES.below(version=version)


def is_marker(name: str) -> bool:
    """Return whether a file of a version is put last, and completes it: of a full one, or of one of differences."""
    return WEIGHTS.parse(name) is not None or DELTAS.parse(name) is not None


def read_delta(root: Root, version: int) -> Delta | None:
    """Return the delta.json of a version; None if there is none. Raises SchemaError if it is broken."""
    name = DELTAS.name(VersionName(version))
    delta = DELTAS.read(root, version)
    if delta is not None and not delta.base < delta.version == version:
        raise SchemaError(
            f"{root.url}/{name} is of version {delta.version} with base {delta.base}, wanted version {version} with an "
            "earlier base; put a sound copy in its place"
        )
    return delta


def with_chains(root: Root, versions: Iterable[int], *, strict: bool = True) -> set[int]:
    """Return these versions, and all versions that they are differences to.

    A broken delta.json raises SchemaError; if not strict, its chain ends there.
    """
    found: set[int] = set()
    for each in versions:
        version: int | None = each
        while version is not None and version not in found:
            found.add(version)
            try:
                delta = read_delta(root, version)
            except SchemaError:
                if strict:
                    raise
                delta = None
            version = delta.base if delta else None
    return found


def has_weights(root: Root, version: int) -> bool:
    """Return whether the weights of a version are complete, in full or as differences."""
    return _is_full(root, version) or root.exists(DELTAS.name(VersionName(version)))


def published_digests(root: Root, version: int) -> dict[str, str] | None:
    """Return the digest of each file of a version, by name; None if its weights are not stored, or without digests.

    Raises SchemaError if a record of them is broken.
    """
    if _is_full(root, version):
        return read_manifest(root, policy_folder(version))
    delta = read_delta(root, version)
    return delta.files if delta else None


def fetch_policy(root: Root, version: int, cache: Path) -> str:
    """Return a local folder with a version's weights: the root's own folder if it is local and the version is full.

    Otherwise a copy below `cache`. Differences are applied to the newest version there that they lead from, else to
    the root's full version. Raises FileNotFoundError if the version, or one that it is a difference to, was never
    complete or is deleted; SchemaError if a file differs from the published file.
    """
    name = policy_folder(version)
    if root.is_local and _is_full(root, version):
        check_folder(root, name)
        return str(root.folder_for_others(name))
    folder = _cached(cache, version)
    if not folder.exists():
        _make_copy(root, version, folder, cache)
    elif not has_weights(root, version):
        raise FileNotFoundError(f"{root.url}/{name} holds no weights")
    _forget_older(cache, version)
    return str(folder)


def copy_policy(root: Root, version: int, folder: Path, cache: Path | None = None) -> None:
    """Copy all files of a version into an empty local folder, also if the root holds differences.

    cache: folder of sound copies of earlier versions, if any. Raises FileNotFoundError and SchemaError as fetch_policy.
    """
    start, deltas = _find_chain(root, version, cache)
    if cache is not None and _cached(cache, start).exists():
        shutil.copytree(_cached(cache, start), folder, dirs_exist_ok=True)
    else:
        root.download(policy_folder(start), folder)
        check_copy(folder, f"{root.url}/{policy_folder(start)}")
    for delta in deltas:
        _apply(root, delta, folder)
    if deltas:
        _complete(root, deltas[-1], folder)


def _is_full(root: Root, version: int) -> bool:
    return root.exists(WEIGHTS.name(VersionName(version)))


def _cached(cache: Path, version: int) -> Path:
    return cache / f"version={version}"


def _make_copy(root: Root, version: int, folder: Path, cache: Path) -> None:
    """Make a local copy that appears whole; several processes may copy at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        copy_policy(root, version, partial, cache)
        partial.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _forget_older(cache: Path, version: int) -> None:
    """Delete local copies older than the version before this one; they are never sampled with again."""
    for folder in cache.glob("version=*"):
        if int(folder.name.removeprefix("version=")) < version - 1:
            shutil.rmtree(folder, ignore_errors=True)


def _find_chain(root: Root, version: int, cache: Path | None) -> tuple[int, list[Delta]]:
    """Return the version to start from, in the cache or full, and the differences that lead from it, oldest first."""
    start, deltas = version, list[Delta]()
    while not _is_sound_copy(cache, start) and not _is_full(root, start):
        delta = read_delta(root, start)
        if delta is None:
            needed_by = (
                "" if start == version else f"; version {version} is a difference to it, so wait for a newer one"
            )
            raise FileNotFoundError(f"{root.url}/{policy_folder(start)} holds no weights{needed_by}")
        deltas.insert(0, delta)
        start = delta.base
    return start, deltas


def _is_sound_copy(cache: Path | None, version: int) -> bool:
    """Return whether there is a sound copy; deletes one that changed since it was made."""
    if cache is None or not _cached(cache, version).exists():
        return False
    try:
        check_copy(_cached(cache, version), str(cache))
    except (SchemaError, FileNotFoundError):  # another process may just delete it
        shutil.rmtree(_cached(cache, version), ignore_errors=True)
        return False
    return True


def _apply(root: Root, delta: Delta, folder: Path) -> None:
    """Turn the files of a version's base, in `folder`, into those of the version, without a check of the result."""
    name = policy_folder(delta.version)
    with tempfile.TemporaryDirectory(dir=folder.parent) as copy:
        root.download(name, copy, leave_out=(POLICIES.file, DELTAS.file))
        check_copy(Path(copy), f"{root.url}/{name}")
        for file in sorted(Path(copy).rglob(f"*{DELTA_SUFFIX}")):
            target = file.relative_to(copy).as_posix().removesuffix(DELTA_SUFFIX)
            try:
                apply_delta(file, folder / target)
            except (ValueError, FileNotFoundError) as error:
                raise SchemaError(_misfit(root, delta, target, str(error))) from error


def _complete(root: Root, delta: Delta, folder: Path) -> None:
    """Check every file of a version to which all differences were applied, and write its digests.json."""
    for name in {MANIFEST, POLICIES.file} - delta.files.keys():  # of the base
        (folder / name).unlink(missing_ok=True)
    found = write_manifest(folder)
    differing = sorted(name for name in found.keys() | delta.files.keys() if found.get(name) != delta.files.get(name))
    if differing:
        raise SchemaError(_misfit(root, delta, differing[0], "the result does not match its digest"))


def _misfit(root: Root, delta: Delta, name: str, problem: str) -> str:
    return (
        f"{root.url}/{policy_folder(delta.version)}: the differences of {name} do not fit version {delta.base}: "
        f"{problem}; wait for the next full version, or put sound copies in the place of both"
    )
