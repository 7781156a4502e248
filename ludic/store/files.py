"""Names of the files that workers append and compaction merges, and listings of rollout files.

{folder}/version={policy_version}/env={env_name, percent-encoded}/{worker_id}-{sequence}.parquet
requests/{worker_id}-{sequence}.parquet

A group whose rollouts differ in policy_version, because weights changed while it was sampled, lies in the partition
of the oldest version. Compaction writes files under a worker_id that no worker may have; their footers name
the sources that they replace.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple
from urllib.parse import quote, unquote

from ludic.errors import ConfigError
from ludic.store.names import NUMBER, parse_numbers
from ludic.store.root import Root

Folder = Literal["rollouts", "evals"]

COMPACTED = "compacted."
"""Start of the worker_id in the name of a compacted file; its rows keep their own worker_id and sequence."""

_NAME = re.compile(rf"(?:rollouts|evals)/version={NUMBER}/env=([^/]+)/([^/]+)-{NUMBER}\.parquet")
_REQUESTS_NAME = re.compile(rf"requests/([^/]+)-{NUMBER}\.parquet")
_CONCURRENT_LISTINGS = 16
_SLOT = re.compile(rf"w{NUMBER}-")
# Not "." or "_" first: pyarrow.dataset and Spark treat such files as hidden.
_WORKER_ID = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._-]{0,199}")


class Source(NamedTuple):
    """Name of the rows that a worker committed as one file; readers count by it, whatever file holds the rows now."""

    worker_id: str
    sequence: int


def parse_source(worker_id: object, sequence: object) -> Source:
    """Parse a source that a file names. Raises ValueError if no worker commits such a source."""
    if not isinstance(worker_id, str) or not isinstance(sequence, int) or sequence < 0:
        raise ValueError(f"[{worker_id!r}, {sequence!r}] is no worker_id with a sequence")
    return Source(check_worker_id(worker_id), sequence)


@dataclass(frozen=True, slots=True, order=True)
class RolloutFile:
    """A file of rollouts, described by its name alone."""

    version: int
    env_name: str
    worker_id: str
    sequence: int
    folder: Folder = "rollouts"

    table: ClassVar = "rollouts"
    """Table of its rows."""

    @property
    def partition(self) -> str:
        """Path of the file's folder below the root."""
        return f"{self.folder}/version={self.version}/env={_quoted(self.env_name)}"

    @property
    def name(self) -> str:
        """Path below the root."""
        return f"{self.partition}/{self.worker_id}-{self.sequence}.parquet"

    @property
    def source(self) -> Source:
        """Source of a worker's file; not for compacted files, which have several."""
        assert not self.is_compacted, f"{self.name} has many sources"
        return Source(self.worker_id, self.sequence)

    @property
    def is_compacted(self) -> bool:
        return self.worker_id.startswith(COMPACTED)

    @classmethod
    def parse(cls, name: str) -> "RolloutFile | None":
        """Parse a file's path below the root; returns None if neither a worker nor compaction writes such a name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        version, env, worker_id, sequence = match.groups()
        folder: Folder = "evals" if name.startswith("evals/") else "rollouts"
        file = cls(int(version), unquote(env), worker_id, int(sequence), folder)
        # With another spelling of the environment, later reads would look for a name that does not exist.
        return file if file.name == name else None


@dataclass(frozen=True, slots=True, order=True)
class RequestsFile:
    """A file of requests/, described by its name alone; the whole folder is one partition."""

    worker_id: str
    sequence: int

    table: ClassVar = "requests"
    partition: ClassVar = "requests"

    @property
    def name(self) -> str:
        """Path below the root."""
        return f"{self.partition}/{self.worker_id}-{self.sequence}.parquet"

    @property
    def source(self) -> Source:
        """Source of a worker's file; not for compacted files, which have several."""
        assert not self.is_compacted, f"{self.name} has many sources"
        return Source(self.worker_id, self.sequence)

    @property
    def is_compacted(self) -> bool:
        return self.worker_id.startswith(COMPACTED)

    @classmethod
    def parse(cls, name: str) -> "RequestsFile | None":
        """Parse a file's path below the root; returns None if neither a worker nor compaction writes such a name."""
        match = _REQUESTS_NAME.fullmatch(name)
        return cls(match[1], int(match[2])) if match else None


AppendedFile = RolloutFile | RequestsFile
"""A file that a worker appended, or that compaction merged from such files of its partition."""


def parse_file(name: str) -> AppendedFile | None:
    """Parse a path below the root; returns None if neither a worker's append nor compaction writes such a name."""
    return RolloutFile.parse(name) or RequestsFile.parse(name)


@lru_cache(maxsize=1024)
def _quoted(env_name: str) -> str:
    """Percent-encode the name of an environment; a run has few of them and many files."""
    return quote(env_name, safe="")


def check_worker_id(worker_id: str) -> str:
    """Return the id. Raises ConfigError if it is not safe in a file name."""
    if not _WORKER_ID.fullmatch(worker_id) or worker_id.startswith(COMPACTED):
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


def list_names(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[str]:
    """List the names of all files in a range of versions, or in all; partitions of other versions are not listed."""
    if versions is None:
        return root.list(folder)
    folders = [f"{folder}/version={version}" for version in versions]
    if root.is_local:  # a thread costs more than a local listing
        return [name for each in folders for name in root.list(each)]
    with ThreadPoolExecutor(_CONCURRENT_LISTINGS) as pool:
        return [name for names in pool.map(root.list, folders) for name in names]


def list_files(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[RolloutFile]:
    """List rollout files in a range of versions, or in all, sorted by version, environment, worker and sequence."""
    return sorted(file for file in map(RolloutFile.parse, list_names(root, versions, folder)) if file is not None)


def list_versions(root: Root, folder: Folder = "rollouts") -> list[int]:
    """List the versions that have a partition, in order."""
    return parse_numbers([name.rpartition("version=")[2] for name in root.folders(folder)])
