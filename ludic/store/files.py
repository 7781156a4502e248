"""Rollout files, known by their names.

{folder}/version={policy_version}/env={env_name, percent-encoded}/{worker_id}-{sequence}.parquet

A group whose rollouts differ in policy_version, since weights were swapped under it, lies in the partition
of the oldest. Compaction writes files under a worker_id that no worker may have, and whose footer names
the files that they replace.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

from ludic.errors import ConfigError
from ludic.store.names import NUMBER, parse_numbers
from ludic.store.root import Root

Folder = Literal["rollouts", "evals"]

COMPACTED = "compacted."
"""How the worker_id in the name of a compacted file begins; its rows keep the worker_id and sequence they came with."""

_NAME = re.compile(rf"(?:rollouts|evals)/version={NUMBER}/env=([^/]+)/([^/]+)-{NUMBER}\.parquet")
_CONCURRENT_LISTINGS = 16
_SLOT = re.compile(rf"w{NUMBER}-")
# Not "." or "_" first: pyarrow.dataset and Spark take such files for hidden ones.
_WORKER_ID = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._-]{0,199}")


class Source(NamedTuple):
    """What a worker committed as one file: what readers count by, whatever file holds the rows now."""

    worker_id: str
    sequence: int


def parse_source(worker_id: object, sequence: object) -> Source:
    """A source that a file names. Raises ValueError for what no worker commits."""
    if not isinstance(worker_id, str) or not isinstance(sequence, int) or sequence < 0:
        raise ValueError(f"[{worker_id!r}, {sequence!r}] is no worker_id with a sequence")
    return Source(check_worker_id(worker_id), sequence)


@dataclass(frozen=True, slots=True, order=True)
class RolloutFile:
    """A file of rollouts, known by its name alone."""

    version: int
    env_name: str
    worker_id: str
    sequence: int
    folder: Folder = "rollouts"

    @property
    def partition(self) -> str:
        """The folder it lies in, below the root."""
        return f"{self.folder}/version={self.version}/env={quote(self.env_name, safe='')}"

    @property
    def name(self) -> str:
        """Path below the root."""
        return f"{self.partition}/{self.worker_id}-{self.sequence}.parquet"

    @property
    def source(self) -> Source:
        """Of a worker's file."""
        assert not self.is_compacted, f"{self.name} has many sources"
        return Source(self.worker_id, self.sequence)

    @property
    def is_compacted(self) -> bool:
        return self.worker_id.startswith(COMPACTED)

    @classmethod
    def parse(cls, name: str) -> "RolloutFile | None":
        """None for a name that no worker writes."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        version, env, worker_id, sequence = match.groups()
        folder: Folder = "evals" if name.startswith("evals/") else "rollouts"
        file = cls(int(version), unquote(env), worker_id, int(sequence), folder)
        # Another spelling of the environment would be looked for under a name that is not there.
        return file if file.name == name else None


def check_worker_id(worker_id: str) -> str:
    """Raises ConfigError for an id that would not be safe in a file name."""
    if not _WORKER_ID.fullmatch(worker_id) or worker_id.startswith(COMPACTED):
        raise ConfigError(
            f"worker_id {worker_id!r} is no file name; wanted letters, digits, '-', '.' and '_', at most 200, "
            f"the last two not in front, and not {COMPACTED!r}"
        )
    return worker_id


def slot_prefix(slot: int) -> str:
    """How the worker_ids of a slot of the schedule begin."""
    return f"w{slot}-"


def slot_of(worker_id: str) -> int | None:
    """None for a worker that follows no schedule, such as an import."""
    match = _SLOT.match(worker_id)
    return int(match[1]) if match else None


def list_names(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[str]:
    """Names of what lies in a range of versions, or in all of them; other partitions are not listed."""
    if versions is None:
        return root.list(folder)
    folders = [f"{folder}/version={version}" for version in versions]
    if root.is_local:  # where a thread costs more than a listing
        return [name for each in folders for name in root.list(each)]
    with ThreadPoolExecutor(_CONCURRENT_LISTINGS) as pool:
        return [name for names in pool.map(root.list, folders) for name in names]


def list_files(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[RolloutFile]:
    """Rollout files in a range of versions, or all of them, sorted by version, environment, worker and sequence."""
    return sorted(file for file in map(RolloutFile.parse, list_names(root, versions, folder)) if file is not None)


def list_versions(root: Root, folder: Folder = "rollouts") -> list[int]:
    """Versions that have a partition, in order."""
    return parse_numbers([name.rpartition("version=")[2] for name in root.folders(folder)])
