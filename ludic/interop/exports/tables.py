"""Code shared by the exports to table formats: footers of files, and the report of an export.

Reads footers. A broken file is left out with its reason, as in readers.
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
    """A sound file, with its size and number of rows."""

    file: RolloutFile
    size_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """Changes that an export made to a table."""

    location: str
    version: int
    """Version of a Delta table, or number of snapshots of an Iceberg table."""
    num_added: int
    num_removed: int
    num_files: int
    """Number of files in the table after the export."""
    left_out: Mapping[str, str]
    """Reason by name of each broken file."""


def read_footers(
    root: Root, files: Collection[RolloutFile], sizes: Mapping[str, int], track: Track = untracked
) -> tuple[list[Footer], dict[str, str]]:
    """Return the footers of the sound files, and the reason by name of each broken file.

    A file that vanished is in neither. sizes: bytes by name.
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
