"""policies/: weights that the trainer publishes and the workers pick up.

A publish claims a version by policies/version=V/policy.json, put if absent, so no version is used twice. Then it puts
the Hugging Face folder beside that file, with digests.json of its files, config.json last. Then it replaces
policies/LATEST, which names the newest version. So a version with a config.json is complete, and so is the version
that LATEST names. A version may hold differences to an earlier version instead; then delta.json comes last
(ludic.store.policy_files).
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ludic.errors import SchemaError
from ludic.store.catalogue import DELTAS, LATEST, POLICIES, WEIGHT_FILES, WEIGHTS
from ludic.store.claims import Register
from ludic.store.manifest import MANIFEST, write_manifest
from ludic.store.policy_files import is_marker, policy_folder, with_chains
from ludic.store.records import LatestPolicy, Policy, encode_record
from ludic.store.root import Root

logger = logging.getLogger(__name__)


def latest_policy(root: Root) -> LatestPolicy | None:
    """Return the content of LATEST; None before the first publish.

    Raises SchemaError if the file can't be parsed, or if a trainer of another run wrote it, which the trainer of this
    run mends; ReplacedRootError if the root is no longer the run that was opened.
    """
    latest = LATEST.read(root)
    if latest is not None and latest.run_id not in (None, root.run_id):
        root.check_same_run()
        raise SchemaError(
            f"{root.url}/{LATEST.template} is of run {latest.run_id}, wanted {root.run_id}; a trainer mends it"
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
        logger.warning("no old weights are deleted: %s", error)
        return
    # Nine versions, not one, so that a successor deletes the versions that a killed trainer left.
    old = with_chains(root, range(max(0, oldest_kept - 9), oldest_kept), strict=False) - needed
    for version in sorted(old, reverse=True):  # differences before the versions that they need
        _delete_weights(root, policy_folder(version))


def _delete_weights(root: Root, folder: str) -> None:
    # In this order, so that a reader finds no version rather than a version that lacks files.
    names = [name for name in root.list(folder) if POLICIES.parse(name) is None]
    for name in sorted(names, key=lambda name: not (is_marker(name) or name.endswith(f"/{MANIFEST}"))):
        root.delete(name)
