"""policies/: weights that the trainer publishes and the workers pick up.

A publish claims a version by policies/version=V/policy.json, put if absent, so no version is used twice. Then it puts
the Hugging Face folder beside that file, with digests.json of its files, config.json last. Then it replaces
policies/LATEST, which names the newest version. So a version with a config.json is complete, and so is the version
that LATEST names.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ludic.errors import SchemaError
from ludic.store.json_files import Count, encode_record, read_record
from ludic.store.manifest import MANIFEST, check_copy, check_folder, write_manifest
from ludic.store.names import parse_numbers
from ludic.store.root import Root

LATEST = "policies/LATEST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """policy.json: the origin of a version's weights."""

    version: Count
    step: int
    """Gradient steps that made these weights."""
    attempt_id: int
    parent_version: int | None
    created_at: str

    @property
    def name(self) -> str:
        return f"{policy_folder(self.version)}/policy.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestPolicy:
    """policies/LATEST: the version to sample with, and how many groups to sample with it."""

    version: Count
    groups_per_worker: Count
    """Groups that each worker may sample with this version. The trainer raises the number when it was
    too low, because filters dropped much or a worker died; so no run can starve."""


def policy_folder(version: int) -> str:
    return f"policies/version={version}"


def latest_policy(root: Root) -> LatestPolicy | None:
    """Return the content of LATEST; None before the first publish. Raises SchemaError if the file can't be parsed."""
    return read_record(root, LATEST, LatestPolicy, "name of a policy", "the next publish replaces it")


def newest_version(root: Root) -> int | None:
    """Return the version that LATEST names, or the newest claimed if LATEST is broken; None before the first."""
    try:
        latest = latest_policy(root)
    except SchemaError:
        return max(policy_versions(root), default=None)
    return latest.version if latest else None


def read_policy(root: Root, version: int) -> Policy | None:
    """Return the policy.json of a version; None if the version is not claimed. Raises SchemaError if it is broken."""
    return read_record(root, f"{policy_folder(version)}/policy.json", Policy, "policy.json")


def point_latest(root: Root, latest: LatestPolicy) -> None:
    """Replace LATEST. Only the trainer that owns the root calls this."""
    root.put(LATEST, encode_record(latest))


def publish_policy(
    root: Root,
    save: Callable[[Path], None],
    *,
    step: int,
    attempt_id: int,
    parent_version: int | None,
    groups_per_worker: Callable[[int], int],
) -> int:
    """Claim the next version, write its weights, point LATEST at it, and return the version.

    save: writes a Hugging Face folder into an empty local folder. groups_per_worker: maps the claimed
    version to LatestPolicy.groups_per_worker. If either raises, LATEST is unchanged.
    """
    version = claim_policy(root, step=step, attempt_id=attempt_id, parent_version=parent_version)
    write_policy(root, version, save)
    point_latest(root, LatestPolicy(version=version, groups_per_worker=groups_per_worker(version)))
    return version


def write_policy(root: Root, version: int, save: Callable[[Path], None]) -> None:
    """Write the weights of a claimed version, config.json last. save: see `publish_policy`."""
    with root.scratch_folder() as folder:
        save(folder)
        write_manifest(folder)
        root.upload(folder, policy_folder(version), last="config.json")


def claim_policy(root: Root, *, step: int, attempt_id: int, parent_version: int | None) -> int:
    """Write policy.json of the next free version, and return the version."""
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
        if root.put_if_absent(policy.name, encode_record(policy)):
            return version
        version += 1


def fetch_policy(root: Root, version: int, cache: Path) -> str:
    """Return a local folder with a version's weights: the root's own folder if it is local, else a copy below `cache`.

    Raises FileNotFoundError if the version was never complete or is deleted, SchemaError if its files differ from the
    published files.
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
    """Make a local copy that appears whole; several processes may copy at the same time."""
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
    """Delete local copies older than the version before this one; they are never sampled with again."""
    for folder in cache.glob("version=*"):
        if int(folder.name.removeprefix("version=")) < version - 1:
            shutil.rmtree(folder, ignore_errors=True)


def policy_versions(root: Root) -> list[int]:
    """Return the claimed versions, in order; the newest may be incomplete."""
    return parse_numbers([folder.rpartition("version=")[2] for folder in root.folders("policies")])


def stored_versions(root: Root) -> list[int]:
    """Return the versions whose weights are stored, in order, by one listing."""
    names = [name.split("/") for name in root.list("policies")]
    return parse_numbers([parts[1].removeprefix("version=") for parts in names if parts[2:] == ["config.json"]])


def prune_policies(root: Root, keep: int, latest_version: int) -> None:
    """Delete the weights of versions older than the newest `keep`, and the files of claims never completed.

    policy.json is kept: it is a few bytes, and rollouts refer to it.
    """
    # Nine versions, not one, so that a successor deletes the versions that a killed trainer left.
    for version in range(max(0, latest_version - keep - 8), latest_version - keep + 1):
        folder = policy_folder(version)
        # In this order, so that a reader finds no version rather than a version that lacks files.
        first = [f"{folder}/config.json", f"{folder}/{MANIFEST}"]
        for name in sorted(root.list(folder), key=lambda name: name not in first):
            if not name.endswith("/policy.json"):
                root.delete(name)
