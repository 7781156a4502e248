"""What tables over a root's files have in common: what they must know of a file, and what an export changed.

Reads footers. A broken file is left out with its reason, as it is by readers.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ludic.errors import SchemaError
from ludic.store import RolloutFile, Root
from ludic.store.parquet import open_parquet
from ludic.store.track import Track, untracked

_CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """A sound file."""

    file: RolloutFile
    size_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """What an export changed in a table."""

    location: str
    version: int
    """Of a Delta table, its version; of an Iceberg table, its snapshots."""
    num_added: int
    num_removed: int
    num_files: int
    """In the table now."""
    left_out: Mapping[str, str]
    """Broken files by name, and why."""


def read_footers(
    root: Root, files: Collection[RolloutFile], sizes: Mapping[str, int], track: Track = untracked
) -> tuple[list[Footer], dict[str, str]]:
    """The sound ones of `files`, and why others are left out. One that vanished meanwhile is in neither.

    sizes: in bytes, by name.
    """

    def read(file: RolloutFile) -> Footer | str | None:
        try:
            with open_parquet(root, file.name) as parquet:
                return Footer(file=file, size_bytes=sizes[file.name], num_rows=parquet.metadata.num_rows)
        except (FileNotFoundError, KeyError):
            return None
        except SchemaError as error:
            return str(error)

    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        found = list(track(pool.map(read, files), len(files), "footers"))
    left_out = {file.name: answer for file, answer in zip(files, found, strict=True) if isinstance(answer, str)}
    return [answer for answer in found if isinstance(answer, Footer)], left_out
