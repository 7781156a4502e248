"""Publish the trainer's weights, and fetch them for workers: policies/.

A publish claims a version by policies/version=V/policy.json, put if absent, so no version is used twice. Then it puts
the Hugging Face folder beside that file, with digests.json of its files, config.json last. Then it replaces
policies/LATEST, which names the newest version. So a version with a config.json is complete, and so is the version that
LATEST names. A version may hold differences to an earlier version instead; then delta.json comes last (see below).
Raises SchemaError if a file is broken or differs from the published one, ReplacedRootError if the root was deleted or
created again.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ludic.base import temporary_folder
from ludic.errors import SchemaError
from ludic.root.catalogue import DELTAS, LATEST, POLICIES, WEIGHT_FILES, WEIGHTS, VersionName
from ludic.root.claims import Register
from ludic.root.json_records import Delta, LatestPolicy, Policy, encode_record
from ludic.root.root import Root
from ludic.root.weights.weight_folders import (
    MANIFEST,
    apply_delta,
    check_copy,
    check_folder,
    read_manifest,
    write_delta,
    write_manifest,
)

logger = logging.getLogger(__name__)


def latest_policy(root: Root) -> LatestPolicy | None:
    """Return the content of LATEST; None before the first publish.

    Raises SchemaError if the file can't be parsed, or if a trainer of another run wrote it (the next publish of this
    run replaces it); ReplacedRootError if the root is no longer the run that was opened.
    """
    latest = LATEST.read(root)
    if latest is not None and latest.run_id not in (None, root.run_id):
        root.check_same_run()
        raise SchemaError(
            f"{root.url}/{LATEST.template} is of run {latest.run_id}, wanted {root.run_id}; the next publish "
            "replaces it"
        )
    return latest


def newest_version(root: Root) -> int | None:
    """Return the version that LATEST names, or the newest claimed if LATEST is broken; None before the first."""
    try:
        latest = latest_policy(root)
    except SchemaError:
        return max(policy_versions(root), default=None)
    return latest.version if latest else None


def read_policy(root: Root, version: int) -> Policy | None:
    """Return the policy.json of a version; None if the version is not claimed. Raises SchemaError if it is broken."""
    return POLICIES.read(root, version)


def point_latest(root: Root, latest: LatestPolicy) -> None:
    """Replace LATEST. Only the trainer that owns the root calls this."""
    root.put(LATEST.template, encode_record(replace(latest, run_id=root.run_id)))


def publish_policy(
    root: Root,
    save: Callable[[Path], None],
    *,
    step: int,
    attempt_id: int,
    parent_version: int | None,
    budget: int = 0,
) -> int:
    """Claim the next version, write its weights, point LATEST at it, and return the version.

    save: writes a Hugging Face folder into an empty local folder; if it raises, LATEST is unchanged. budget: of open
    groups. Raises ReplacedRootError if the root is no longer the run that was opened.
    """
    root.check_same_run()
    version = claim_policy(root, step=step, attempt_id=attempt_id, parent_version=parent_version)
    write_policy(root, version, save)
    root.check_same_run()
    point_latest(root, LatestPolicy(version=version, budget=budget))
    return version


def write_policy(root: Root, version: int, save: Callable[[Path], None]) -> int:
    """Write the weights of a claimed version in full; returns the bytes of its files. save: see `publish_policy`."""
    with root.scratch_folder() as folder:
        save(folder)
        write_manifest(folder)
        return upload_policy(root, version, folder, last=WEIGHTS.file)


def upload_policy(root: Root, version: int, folder: Path, *, last: str) -> int:
    """Move the files of a local folder into a claimed version; returns their bytes. last: the file moved last."""
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    root.upload(folder, policy_folder(version), last=last)
    return num_bytes


def claim_policy(root: Root, *, step: int, attempt_id: int, parent_version: int | None) -> int:
    """Write policy.json of the next free version, and return the version."""
    newest = newest_version(root)

    def make(version: int) -> Policy:
        return Policy(
            version=version,
            step=step,
            attempt_id=attempt_id,
            parent_version=parent_version,
            created_at=datetime.now(UTC).isoformat(),
        )

    return Register(root, POLICIES).claim(make, first=0 if newest is None else newest + 1).version


def policy_versions(root: Root) -> list[int]:
    """Return the claimed versions, in order; the newest may be incomplete."""
    return POLICIES.first_fields(root)


def stored_versions(root: Root) -> list[int]:
    """Return the versions whose weights are stored, in full or as differences, in order, by one listing."""
    return versions_with_weights(root.list(WEIGHT_FILES.folder))


def versions_with_weights(names: Iterable[str]) -> list[int]:
    """Return the versions whose weights are complete, in order. names: of the files in policies/."""
    found = list(names)
    return sorted({name.version for row in (WEIGHTS, DELTAS) for name in row.parsed(found)})


def prune_policies(root: Root, keep: int, latest_version: int) -> None:
    """Delete the weights of versions older than the newest `keep`, and the files of claims never completed.

    Versions that a kept version is a difference to are kept, too; so is everything if a kept delta.json is damaged.
    policy.json is kept: it is a few bytes, and rollouts refer to it.
    """
    oldest_kept = latest_version - keep + 1
    try:
        needed = with_chains(root, range(max(0, oldest_kept), latest_version + 1))
    except SchemaError as error:
        logger.warning("old weights were not deleted: %s", error)
        return
    # Nine versions, not one, so that a successor deletes the versions that a killed trainer left.
    old = with_chains(root, range(max(0, oldest_kept - 9), oldest_kept), strict=False) - needed
    for version in sorted(old, reverse=True):  # delete differences before the versions that they need
        _delete_weights(root, policy_folder(version))


def _delete_weights(root: Root, folder: str) -> None:
    # This order ensures that a reader finds no version rather than an incomplete one.
    names = [name for name in root.list(folder) if POLICIES.parse(name) is None]
    for name in sorted(names, key=lambda name: not (is_marker(name) or name.endswith(f"/{MANIFEST}"))):
        root.delete(name)


# --- Files of a version ---------------------------------------------------------------------------------------
# Files of a published version: a Hugging Face folder, or differences to an earlier version.
#
# A folder policies/version=V/ with a config.json holds all files. A folder with a delta.json holds a NAME.delta for
# each safetensors file that changed (ludic.root.weights.weight_folders); its other files are those of the version that
# delta.json names as its base. The base may hold differences, too, so a chain of versions ends at a full one.
# delta.json also holds the digest of every file of the whole version: a reader checks them before it gives the files to
# anyone.


FIRST_VERSION = 0
"""Version of the first model, whether or not it was published."""


def versions_to_compute_with(root: Root) -> list[int]:
    """Return the versions whose whole weights are in the root, and FIRST_VERSION; not those published as adapters."""
    names = set(root.list(WEIGHT_FILES.folder))
    adapters = {f"{policy_folder(version)}/adapter_config.json": version for version in versions_with_weights(names)}
    return sorted({FIRST_VERSION, *(version for name, version in adapters.items() if name not in names)})


DELTA_SUFFIX = ".delta"


def policy_folder(version: int) -> str:
    return WEIGHT_FILES.below(version=version)


def is_marker(name: str) -> bool:
    """Return whether a file is written last into a version and completes it, whether full or of differences."""
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
        _copy_files(_cached(cache, start), folder)
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
    except (SchemaError, FileNotFoundError):  # another process may be deleting it
        shutil.rmtree(_cached(cache, version), ignore_errors=True)
        return False
    return True


def _apply(root: Root, delta: Delta, folder: Path) -> None:
    """Turn the files of a version's base, in `folder`, into those of the version, without a check of the result."""
    name = policy_folder(delta.version)
    with tempfile.TemporaryDirectory(dir=folder) as copy:  # this user may not be allowed to write beside it
        root.download(name, copy, leave_out=(POLICIES.file, DELTAS.file))
        check_copy(Path(copy), f"{root.url}/{name}")
        for file in sorted(Path(copy).rglob(f"*{DELTA_SUFFIX}")):
            target = file.relative_to(copy).as_posix().removesuffix(DELTA_SUFFIX)
            try:
                apply_delta(file, folder / target)
            except (ValueError, FileNotFoundError) as error:
                raise SchemaError(_misfit(root, delta, target, str(error))) from error


def _complete(root: Root, delta: Delta, folder: Path) -> None:
    """Check every file of a version after all differences were applied, and write its digests.json."""
    for name in {MANIFEST, POLICIES.file} - delta.files.keys():  # digests of the base
        (folder / name).unlink(missing_ok=True)
    found = write_manifest(folder)
    differing = sorted(name for name in found.keys() | delta.files.keys() if found.get(name) != delta.files.get(name))
    if differing:
        raise SchemaError(_misfit(root, delta, differing[0], "the result does not match its digest"))


def _misfit(root: Root, delta: Delta, name: str, problem: str) -> str:
    return (
        f"{root.url}/{policy_folder(delta.version)}: the differences of {name} do not fit version {delta.base}: "
        f"{problem}; wait for the next full version, or replace both by sound copies"
    )


# --- Writer of versions ---------------------------------------------------------------------------------------
# Write the weights of published versions: full ones, and between them differences to the version before.
#
# A reader that follows every version downloads one difference each; a late one downloads the newest full version and
# the differences since. A new writer, as after a restart, begins with a full version. The files of the last version are
# kept in the local temporary folder, where they are compared with the next: a copy of the weights outside memory, and
# nothing is read back from the root.


_WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class _Version:
    """Local files of a version."""

    number: int
    folder: Path
    digests: dict[str, str]
    """Digests by file name, as in digests.json."""


class PolicyWriter:
    """Writes the versions of one trainer, one at a time. `close` deletes the local files."""

    def __init__(self, root: Root, full_every: int | None = None) -> None:
        """full_every: one in this many versions is full, the others are differences; None: all are full."""
        self._root, self._full_every = root, full_every
        self._stack = ExitStack()
        self._folder: Path | None = None
        """Local folder of the versions' files, created on demand; not below a local root, where it would look like a
        leftover of a killed writer."""
        self._last: _Version | None = None
        self._num_deltas = 0
        """Differences since the last full version."""

    def write(self, version: int, save: Callable[[Path], None]) -> int:
        """Write the files of a claimed version, the one that completes it last; returns the bytes of all.

        save: writes a Hugging Face folder into an empty local folder.
        """
        if self._full_every is None:
            return write_policy(self._root, version, save)
        if self._folder is None:
            self._folder = self._stack.enter_context(temporary_folder("published"))
        files = self._folder / f"version={version}"
        files.mkdir()
        save(files)
        new = _Version(version, files, write_manifest(files))
        last, self._last = self._last, None  # if writing fails, the next version is full
        num_bytes = None
        if last is not None and self._num_deltas + 1 < self._full_every:
            num_bytes = self._write_delta(last, new)
        self._num_deltas = 0 if num_bytes is None else self._num_deltas + 1
        if num_bytes is None:
            num_bytes = self._write_full(new)
        if last is not None:
            shutil.rmtree(last.folder, ignore_errors=True)
        self._last = new
        return num_bytes

    def close(self) -> None:
        """Delete the local files."""
        self._stack.close()
        self._folder = self._last = None

    def _write_full(self, new: _Version) -> int:
        with self._root.scratch_folder() as folder:
            _copy_files(new.folder, folder, _link)
            return upload_policy(self._root, new.number, folder, last=WEIGHTS.file)

    def _write_delta(self, last: _Version, new: _Version) -> int | None:
        """Write differences and return their bytes; None if the versions differ in more than the values of tensors."""
        if last.digests.keys() != new.digests.keys():
            return None
        changed = [name for name, digest in new.digests.items() if last.digests[name] != digest]
        if not all(name.endswith(_WEIGHTS) for name in changed):
            return None
        with self._root.scratch_folder() as folder:
            for name in changed:
                target = folder / f"{name}{DELTA_SUFFIX}"
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    write_delta(last.folder / name, new.folder / name, target)
                except (
                    ValueError,
                    FileNotFoundError,
                ):  # other tensors than before, or the temporary folder was cleaned
                    return None
            write_manifest(folder)
            delta = Delta(version=new.number, base=last.number, files=new.digests)
            (folder / DELTAS.file).write_bytes(encode_record(delta))
            return upload_policy(self._root, new.number, folder, last=DELTAS.file)


def _copy_files(source: Path, folder: Path, copy: Callable[[Path, Path], object] = shutil.copyfile) -> None:
    """Copy all files below a folder into another, whose permissions stay: shutil.copytree would change them."""
    for file in source.rglob("*"):
        if file.is_file():
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            copy(file, target)


def _link(source: Path, target: Path) -> None:
    """Make a hard link, or a copy if that is impossible, as on another disk: uploading moves files away."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
