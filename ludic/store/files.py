"""Rollout files, known by their names.

{folder}/version={policy_version}/env={env_name, percent-encoded}/{worker_id}-{sequence}.parquet

A group whose rollouts differ in policy_version, since weights were swapped under it, lies in the partition
of the oldest. Compaction writes files under a worker_id that no worker may have, and whose footer names
the files that they replace.
"""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, unquote

from ludic.errors import ConfigError
from ludic.store.root import Root

Folder = Literal["rollouts", "evals"]

COMPACTED = "compacted."
"""How the worker_id in the name of a compacted file begins; its rows keep the worker_id and sequence they came with."""

_NAME = re.compile(r"(?:rollouts|evals)/version=(\d+)/env=([^/]+)/([^/]+)-(\d+)\.parquet")
# Not "." or "_" first: pyarrow.dataset and Spark take such files for hidden ones.
_WORKER_ID = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True, order=True)
class RolloutFile:
    """A file of rollouts, known by its name alone."""

    version: int
    env_name: str
    worker_id: str
    sequence: int
    folder: Folder = "rollouts"

    @property
    def name(self) -> str:
        """Path below the root."""
        env = quote(self.env_name, safe="")
        return f"{self.folder}/version={self.version}/env={env}/{self.worker_id}-{self.sequence}.parquet"

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
        return cls(int(version), unquote(env), worker_id, int(sequence), folder)


def check_worker_id(worker_id: str) -> str:
    """Raises ConfigError for an id that would not be safe in a file name."""
    if not _WORKER_ID.fullmatch(worker_id) or worker_id.startswith(COMPACTED):
        raise ConfigError(
            f"worker_id {worker_id!r} is no file name; wanted letters, digits, '-', '.' and '_', at most 200, "
            f"the last two not in front, and not {COMPACTED!r}"
        )
    return worker_id


def list_files(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[RolloutFile]:
    """Rollout files in a range of versions, or all of them; other partitions are not listed."""
    if versions is None:
        names = root.list(folder)
    else:
        names = [name for version in versions for name in root.list(f"{folder}/version={version}")]
    return sorted(file for file in map(RolloutFile.parse, names) if file is not None)
