"""Names of the files that workers append and compaction merges, and listings of rollout files.

A group whose rollouts differ in policy_version, because weights changed while it was sampled, lies in the partition
of the oldest version. Compaction writes files under a worker_id that no worker may have; their footers name
the sources that they replace.
"""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from ludic.errors import ConfigError
from ludic.store.catalogue import (
    COMPACTED,
    EVALS,
    NUMBER,
    REQUESTS,
    ROLLOUTS,
    WORKER_ID,
    RolloutsName,
    SequenceName,
    Table,
)
from ludic.store.records import Folder
from ludic.store.root import Root

_ROWS: Mapping[Folder, Table[RolloutsName]] = {"rollouts": ROLLOUTS, "evals": EVALS}
FOLDERS = tuple(_ROWS)
"""Folders of rollouts."""
_CONCURRENT_LISTINGS = 16
_SLOT = re.compile(rf"w{NUMBER}-")


class Source(NamedTuple):
    """Name of the rows that a worker committed as one file; readers count by it, whatever file holds the rows now."""

    worker_id: str
    sequence: int


def parse_source(worker_id: object, sequence: object) -> Source:
    """Parse a source that a file names. Raises ValueError if no worker commits such a source."""
    if not isinstance(worker_id, str) or not isinstance(sequence, int) or sequence < 0:
        raise ValueError(f"[{worker_id!r}, {sequence!r}] is no worker_id with a sequence")
    return Source(check_worker_id(worker_id), sequence)


class _Appended:
    """What the names of appended and compacted files have in common."""

    __slots__ = ()
    worker_id: str
    sequence: int

    @property
    def source(self) -> Source:
        """Source of a worker's file; not for compacted files, which have several."""
        assert not self.is_compacted, f"{self.worker_id}-{self.sequence} has many sources"
        return Source(self.worker_id, self.sequence)

    @property
    def is_compacted(self) -> bool:
        return self.worker_id.startswith(COMPACTED)


@dataclass(frozen=True, slots=True, order=True)
class RolloutFile(_Appended):
    """A file of rollouts, described by its name alone."""

    version: int
    env_name: str
    worker_id: str
    sequence: int
    folder: Folder = "rollouts"

    table: ClassVar = ROLLOUTS.table
    """Table of its rows."""

    @property
    def partition(self) -> str:
        """Path of the file's folder below the root."""
        return self.name.rpartition("/")[0]

    @property
    def name(self) -> str:
        """Path below the root."""
        name = RolloutsName(self.version, self.env_name, self.worker_id, self.sequence)
        return _ROWS[self.folder].name(name)

    @classmethod
    def parse(cls, name: str) -> "RolloutFile | None":
        """Parse a file's path below the root; returns None if neither a worker nor compaction writes such a name."""
        folder: Folder = "evals" if name.startswith("evals/") else "rollouts"
        found = _ROWS[folder].parse(name)
        return None if found is None else cls(*found, folder)


@dataclass(frozen=True, slots=True, order=True)
class RequestsFile(_Appended):
    """A file of requests/, described by its name alone; the whole folder is one partition."""

    worker_id: str
    sequence: int

    table: ClassVar = REQUESTS.table
    partition: ClassVar = REQUESTS.folder

    @property
    def name(self) -> str:
        """Path below the root."""
        return REQUESTS.name(SequenceName(self.worker_id, self.sequence))

    @classmethod
    def parse(cls, name: str) -> "RequestsFile | None":
        """Parse a file's path below the root; returns None if neither a worker nor compaction writes such a name."""
        found = REQUESTS.parse(name)
        return None if found is None else cls(*found)


AppendedFile = RolloutFile | RequestsFile
"""A file that a worker appended, or that compaction merged from such files of its partition."""


def output_of(file: AppendedFile, plan: int, index: int) -> AppendedFile:
    """Return an output of a compaction's plan in the partition of a file."""
    return replace(file, worker_id=f"{COMPACTED}{plan}", sequence=index)


def parse_file(name: str) -> AppendedFile | None:
    """Parse a path below the root; returns None if neither a worker's append nor compaction writes such a name."""
    return RolloutFile.parse(name) or RequestsFile.parse(name)


def check_worker_id(worker_id: str) -> str:
    """Return the id. Raises ConfigError if it is not safe in a file name."""
    if not WORKER_ID.fullmatch(worker_id):
        raise ConfigError(
            f"worker_id {worker_id!r} is no file name; wanted letters, digits, '-', '.' and '_', at most 200, "
            f"the last two not in front, and not {COMPACTED!r}"
        )
    return worker_id


def slot_prefix(slot: int) -> str:
    """Return the prefix of the worker_ids of a slot of the schedule."""
    return f"w{slot}-"


def slot_of(worker_id: str) -> int | None:
    """Return the slot of a worker; None if it follows no schedule, such as an import."""
    match = _SLOT.match(worker_id)
    return int(match[1]) if match else None


def version_folder(folder: Folder, version: int) -> str:
    """Return the folder of the partitions of a version."""
    return _ROWS[folder].below(version=version)


def list_names(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[str]:
    """List the names of all files in a range of versions, or in all; partitions of other versions are not listed."""
    if versions is None:
        return root.list(folder)
    folders = [version_folder(folder, version) for version in versions]
    if root.is_local:  # a thread costs more than a local listing
        return [name for each in folders for name in root.list(each)]
    with ThreadPoolExecutor(_CONCURRENT_LISTINGS) as pool:
        return [name for names in pool.map(root.list, folders) for name in names]


def list_files(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[RolloutFile]:
    """List rollout files in a range of versions, or in all, sorted by version, environment, worker and sequence."""
    return sorted(file for file in map(RolloutFile.parse, list_names(root, versions, folder)) if file is not None)


def list_versions(root: Root, folder: Folder = "rollouts") -> list[int]:
    """List the versions that have a partition, in order."""
    return _ROWS[folder].first_fields(root)
