"""Find a rollout or a group by its id: where its rows are, and the rows.

Reads a listing, footers, and the ids of row groups whose statistics allow them. Ids of ludic are uuid7 and so grow
with time, as versions and sequences do: files where that puts an id are looked into first, but all others after them,
so that clocks that disagree and ids of other makers cost time and nothing else. A file that can't be read hides no
other.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import SchemaError
from ludic.schema import rollouts_schema
from ludic.store.files import Folder, RolloutFile, list_files
from ludic.store.parquet import open_parquet, read_row_groups, read_rows
from ludic.store.root import Root

_ID_COLUMNS = ("rollout_id", "group_id")
_FOLDERS: tuple[Folder, ...] = ("rollouts", "evals")
_LOCAL_READS, _REMOTE_READS = 2, 16
_MOST_LISTINGS = 10


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a row is."""

    file: RolloutFile
    row_group: int
    row: int


def find_rows(root: Root, row_or_group_id: str, version: int | None = None) -> list[Address]:
    """Rows of the rollout or of the group that has this id, in the order of their file; empty when there are none.

    version: of the partition, where it is known; then no other one is listed. Raises StoreError.
    """
    versions = None if version is None else range(version, version + 1)
    found: list[Address] | None = None
    for _ in range(_MOST_LISTINGS):
        files = [file for folder in _FOLDERS for file in list_files(root, versions, folder)]
        found = _search(root, files, row_or_group_id)
        if found is not None:
            break
    return found or []


def read_addresses(root: Root, addresses: Sequence[Address]) -> pa.Table:
    """Rows of one file with all columns of the run. Raises SchemaError for a broken file, FileNotFoundError."""
    (name,) = {address.file.name for address in addresses}
    places = [(address.row_group, address.row) for address in addresses]
    return read_rows(root, name, places, rollouts_schema(root.run.extra_columns).names)


def _search(root: Root, files: Sequence[RolloutFile], wanted: str) -> list[Address] | None:
    """None where nothing was found and a file vanished: a compacted one may hold its rows by now."""
    has_vanished = False
    ordered = _likeliest_first(root, files, wanted)
    with ThreadPoolExecutor(_LOCAL_READS if root.is_local else _REMOTE_READS) as pool:
        for start in range(0, len(ordered), _REMOTE_READS):
            results = list(pool.map(lambda file: _rows_in(root, file, wanted), ordered[start : start + _REMOTE_READS]))
            has_vanished |= None in results
            # A file and the one that it was compacted into may both be there.
            for found in filter(None, results):
                return found
    return None if has_vanished else []


def _likeliest_first(root: Root, files: Sequence[RolloutFile], wanted: str) -> list[RolloutFile]:
    """In the order of time as far as names tell, from where a bisection by a few footers puts the id, outwards."""
    num_before: Counter[tuple[int, str, str]] = Counter()
    places: dict[RolloutFile, tuple[int, int]] = {}
    for file in sorted(files):
        worker = (file.version, file.env_name, file.worker_id)
        places[file] = (file.version, num_before[worker])
        num_before[worker] += 1
    ordered = sorted(places, key=places.__getitem__)
    low, high = 0, len(ordered)
    while high - low > 1:
        middle = (low + high) // 2
        lowest = _lowest_id(root, ordered[middle])
        low, high = (middle, high) if lowest is not None and lowest <= wanted else (low, middle)
    return [ordered[place] for place in sorted(range(len(ordered)), key=lambda place: abs(place - low))]


def _lowest_id(root: Root, file: RolloutFile) -> str | None:
    try:
        with open_parquet(root, file.name) as parquet:
            ranges = [_id_ranges(parquet, row_group)["group_id"] for row_group in range(parquet.num_row_groups)]
    except (SchemaError, FileNotFoundError):
        return None
    return min((low for low, _ in filter(None, ranges)), default=None)


def _rows_in(root: Root, file: RolloutFile, wanted: str) -> list[Address] | None:
    """None for a file that is gone."""
    try:
        with open_parquet(root, file.name) as parquet:
            return [
                Address(file, row_group, row)
                for row_group in range(parquet.num_row_groups)
                for row in _rows_of(parquet, row_group, wanted, f"{root.url}/{file.name}")
            ]
    except FileNotFoundError:
        return None
    except SchemaError:
        return []


def _rows_of(parquet: pq.ParquetFile, row_group: int, wanted: str, where: str) -> Iterator[int]:
    ranges = _id_ranges(parquet, row_group)
    columns = [name for name, bounds in ranges.items() if bounds is None or bounds[0] <= wanted <= bounds[1]]
    if columns:
        table = read_row_groups(parquet, [row_group], columns, where)
        # In Python, since pyarrow's compute functions would import pandas for a constant, where it is installed: 0.2 s.
        ids = zip(*(column.to_pylist() for column in table.columns), strict=True)
        yield from (row for row, ids_of_row in enumerate(ids) if wanted in ids_of_row)


def _id_ranges(parquet: pq.ParquetFile, row_group: int) -> dict[str, tuple[str, str] | None]:
    """Bounds of each id by the footer's statistics; None where they say nothing."""
    chunks = parquet.metadata.row_group(row_group)
    found: dict[str, tuple[str, str] | None] = {}
    for place in range(chunks.num_columns):
        name = parquet.schema.column(place).path
        if name in _ID_COLUMNS:
            statistics = chunks.column(place).statistics
            has_bounds = statistics is not None and statistics.has_min_max
            found[name] = (statistics.min, statistics.max) if has_bounds else None
        if len(found) == len(_ID_COLUMNS):
            break  # they are the first columns, and a look at all 48 takes as long as the footer
    return found
