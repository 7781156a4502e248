"""Find a rollout or a group by its id: the addresses of its rows, and the rows.

Reads a listing, footers, and the ids of row groups whose statistics may include the id. Ludic's ids are uuid7 and so
grow with time, as versions and sequences do. The search begins with the files where that order puts the id, and goes
on to all others, so clocks that disagree and foreign ids only cost time. Files that can't be read are skipped.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import SchemaError
from ludic.schema import rollouts_schema
from ludic.store.files import FOLDERS, RolloutFile, list_files
from ludic.store.parquet import group_ranges, open_parquet, read_row_groups, read_rows
from ludic.store.root import Root

_ID_COLUMNS = ("rollout_id", "group_id")
_LOCAL_READS, _REMOTE_READS = 2, 16
_MOST_LISTINGS = 10


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Address of a row: file, row group, and row within it."""

    file: RolloutFile
    row_group: int
    row: int


def find_rows(root: Root, row_or_group_id: str, version: int | None = None) -> list[Address]:
    """Return the addresses of the rows of the rollout or group with this id, in file order; empty if there are none.

    version: the partition's version if it is known; then no other version is listed. Raises StoreError.
    """
    versions = None if version is None else range(version, version + 1)
    found: list[Address] | None = None
    for _ in range(_MOST_LISTINGS):
        files = [file for folder in FOLDERS for file in list_files(root, versions, folder)]
        found = _search(root, files, row_or_group_id)
        if found is not None:
            break
    return found or []


def read_addresses(root: Root, addresses: Sequence[Address]) -> pa.Table:
    """Read rows of one file with all columns of the run.

    Raises SchemaError if the file is broken, FileNotFoundError if it is gone.
    """
    (name,) = {address.file.name for address in addresses}
    positions = [(address.row_group, address.row) for address in addresses]
    return read_rows(root, name, positions, rollouts_schema(root.run.extra_columns).names)


def _search(root: Root, files: Sequence[RolloutFile], wanted: str) -> list[Address] | None:
    """Return the rows found; None if there are none and a file vanished, whose rows a compacted file may hold now."""
    has_vanished = False
    ordered = _likeliest_first(root, files, wanted)
    with ThreadPoolExecutor(_LOCAL_READS if root.is_local else _REMOTE_READS) as pool:
        for start in range(0, len(ordered), _REMOTE_READS):
            results = list(pool.map(lambda file: _rows_in(root, file, wanted), ordered[start : start + _REMOTE_READS]))
            has_vanished |= None in results
            # Return the first file's rows only: a source and its compacted file may both exist.
            for found in filter(None, results):
                return found
    return None if has_vanished else []


def _likeliest_first(root: Root, files: Sequence[RolloutFile], wanted: str) -> list[RolloutFile]:
    """Sort the files by time as far as their names show it, then outwards from where a bisection puts the id.

    The bisection reads a few footers.
    """
    num_before: Counter[tuple[int, str, str]] = Counter()
    order_of: dict[RolloutFile, tuple[int, int]] = {}
    for file in sorted(files):
        worker = (file.version, file.env_name, file.worker_id)
        order_of[file] = (file.version, num_before[worker])
        num_before[worker] += 1
    ordered = sorted(order_of, key=order_of.__getitem__)
    low, high = 0, len(ordered)
    while high - low > 1:
        middle = (low + high) // 2
        lowest = _lowest_id(root, ordered[middle])
        low, high = (middle, high) if lowest is not None and lowest <= wanted else (low, middle)
    return [ordered[index] for index in sorted(range(len(ordered)), key=lambda index: abs(index - low))]


def _lowest_id(root: Root, file: RolloutFile) -> str | None:
    try:
        with open_parquet(root, file.name) as parquet:
            return min((lowest for lowest, _ in group_ranges(parquet)), default=None)
    except (SchemaError, FileNotFoundError):
        return None


def _rows_in(root: Root, file: RolloutFile, wanted: str) -> list[Address] | None:
    """Return the addresses in one file, none if it is broken; returns None if the file is gone."""
    try:
        with open_parquet(root, file.name) as parquet:
            ranges = zip(*(group_ranges(parquet, column) for column in _ID_COLUMNS), strict=True)
            return [
                Address(file, row_group, row)
                for row_group, bounds in enumerate(ranges)
                for row in _rows_of(parquet, row_group, bounds, wanted, f"{root.url}/{file.name}")
            ]
    except FileNotFoundError:
        return None
    except SchemaError:
        return []


def _rows_of(
    parquet: pq.ParquetFile, row_group: int, bounds: Sequence[tuple[str, str | None]], wanted: str, where: str
) -> Iterator[int]:
    """Yield the rows of a row group with this id. bounds: lowest and highest id of each of _ID_COLUMNS."""
    columns = [
        name
        for name, (lowest, highest) in zip(_ID_COLUMNS, bounds, strict=True)
        if lowest <= wanted and (highest is None or wanted <= highest)
    ]
    if columns:
        table = read_row_groups(parquet, [row_group], columns, where)
        # Compare in Python: for a constant, pyarrow's compute functions import pandas if it is installed, which takes
        # 0.2 s.
        ids = zip(*(column.to_pylist() for column in table.columns), strict=True)
        yield from (row for row, ids_of_row in enumerate(ids) if wanted in ids_of_row)
