"""policies/: weights that the trainer publishes and the workers pick up.

policies/version=V/policy.json claims a version, put if absent: no version is ever used twice.
The Hugging Face folder follows beside it, with digests.json of its files, its config.json last, and then
policies/LATEST, which names the newest version, is replaced. So a version with a config.json is complete, and so is
what LATEST names.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ludic.errors import SchemaError
from ludic.store.json_files import Count, decode_record, encode_json
from ludic.store.manifest import MANIFEST, check_copy, check_folder, write_manifest
from ludic.store.names import parse_numbers
from ludic.store.root import Root

LATEST = "policies/LATEST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Where a version's weights came from."""

    version: Count
    step: int
    """Gradient steps behind these weights."""
    attempt_id: int
    parent_version: int | None
    created_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestPolicy:
    """What policies/LATEST says: the version to sample with, and how much of it."""

    version: Count
    groups_per_worker: Count
    """Groups that each worker may sample with this version. The trainer raises it when that was
    not enough, because filters dropped much or a worker died; so no run can starve."""


def policy_folder(version: int) -> str:
    return f"policies/version={version}"


def latest_policy(root: Root) -> LatestPolicy | None:
    """None before the first publication. Raises SchemaError for a file that is no such pointer."""
    try:
        return decode_record(root.read(LATEST), LatestPolicy)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError(
            f"{root.url}/{LATEST} does not name a policy: {error}; the next publication mends it"
        ) from error


def newest_version(root: Root) -> int | None:
    """As LATEST says; where it can't be read, the newest version that was claimed. None before the first."""
    try:
        latest = latest_policy(root)
    except SchemaError:
        return max(policy_versions(root), default=None)
    return latest.version if latest else None


def read_policy(root: Root, version: int) -> Policy | None:
    """Where a version came from; None for one that nobody claimed. Raises SchemaError for what is no policy.json."""
    name = f"{policy_folder(version)}/policy.json"
    try:
        return decode_record(root.read(name), Policy)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError(f"{root.url}/{name} is no policy.json that ludic can read: {error}") from error


def point_latest(root: Root, latest: LatestPolicy) -> None:
    """Replace LATEST; only the trainer that owns the root does."""
    root.put(LATEST, encode_json(asdict(latest)))


def publish_policy(
    root: Root,
    save: Callable[[Path], None],
    *,
    step: int,
    attempt_id: int,
    parent_version: int | None,
    groups_per_worker: Callable[[int], int],
) -> int:
    """Claim the next version, write its weights, then point LATEST at it; returns the version.

    `save` writes a Hugging Face folder into an empty local one; `groups_per_worker` says, for the
    version claimed, what LatestPolicy holds. What either raises leaves LATEST as it is.
    """
    version = _claim(root, step=step, attempt_id=attempt_id, parent_version=parent_version)
    with root.scratch_folder() as folder:
        save(folder)
        write_manifest(folder)
        root.upload(folder, policy_folder(version), last="config.json")
    point_latest(root, LatestPolicy(version=version, groups_per_worker=groups_per_worker(version)))
    return version


def _claim(root: Root, *, step: int, attempt_id: int, parent_version: int | None) -> int:
    newest = newest_version(root)
    version = 0 if newest is None else newest + 1
    while True:
        policy = Policy(
            version=version,
            step=step,
            attempt_id=attempt_id,
            parent_version=parent_version,
            created_at=datetime.now(UTC).isoformat(),
        )
        if root.put_if_absent(f"{policy_folder(version)}/policy.json", encode_json(asdict(policy))):
            return version
        version += 1


def fetch_policy(root: Root, version: int, cache: Path) -> str:
    """A local folder with a version's weights: the root's own where it is local, else a copy below `cache`.

    Raises FileNotFoundError for a version that was never complete or is deleted, SchemaError for one whose files are
    not as they were published.
    """
    name = policy_folder(version)
    if not root.exists(f"{name}/config.json"):
        raise FileNotFoundError(f"{root.url}/{name} holds no weights")
    if root.is_local:
        check_folder(root, name)
        return root.at(name)
    folder = cache / f"version={version}"
    if not folder.exists():
        _copy(root, name, folder)
    _forget_older(cache, version)
    return str(folder)


def _copy(root: Root, name: str, folder: Path) -> None:
    """Make a local copy that appears whole; several processes may do so at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        root.download(name, partial)
        check_copy(partial, f"{root.url}/{name}")
        partial.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _forget_older(cache: Path, version: int) -> None:
    """Keep this version and the one before; older ones are never sampled with again."""
    for folder in cache.glob("version=*"):
        if int(folder.name.removeprefix("version=")) < version - 1:
            shutil.rmtree(folder, ignore_errors=True)


def policy_versions(root: Root) -> list[int]:
    """Versions claimed, in order; the newest may not be complete."""
    return parse_numbers([folder.rpartition("version=")[2] for folder in root.folders("policies")])


def stored_versions(root: Root) -> list[int]:
    """Versions whose weights are there, in order; one listing."""
    names = [name.split("/") for name in root.list("policies")]
    return parse_numbers([parts[1].removeprefix("version=") for parts in names if parts[2:] == ["config.json"]])


def prune_policies(root: Root, keep: int, latest_version: int) -> None:
    """Delete the weights of versions that fell behind the newest `keep`, and of claims never completed.

    policy.json stays: it is a few bytes, and rollouts refer to it.
    """
    # Some more than one, so that what a killed trainer left is deleted by its successor.
    for version in range(max(0, latest_version - keep - 8), latest_version - keep + 1):
        folder = policy_folder(version)
        # In this order, so that whoever reads meanwhile sees a version that is gone, and none that has lost a file.
        first = [f"{folder}/config.json", f"{folder}/{MANIFEST}"]
        for name in sorted(root.list(folder), key=lambda name: name not in first):
            if not name.endswith("/policy.json"):
                root.delete(name)
