"""Deliver every committed group exactly once, across crashes and restarts.

The reader lists only the versions that it is asked for, reads the scalar columns of files it has not
seen, and is told which groups were consumed; its cursor goes into the trainer's checkpoint. Gaps in a
worker's sequence are looked at again at every poll. A broken file is set aside with its reason.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import SchemaError
from ludic.store.cursor import Cursor
from ludic.store.files import RolloutFile, list_files
from ludic.store.parquet import open_parquet, read_row_groups, row_counts
from ludic.store.root import Root

ADDRESS_COLUMNS = ("file", "row_group", "row", "arrival")
"""What the reader adds to each row: path below the root, row group, row in it, and the order in which it was read."""

_CONCURRENT_READS = 8


class RolloutReader:
    """Reads scalars of new groups, and remembers what was consumed."""

    def __init__(self, root: Root, columns: Sequence[str], cursor: Cursor | None = None) -> None:
        """`columns` are read of every row, with worker_id, sequence and group_id in any case."""
        self._root = root
        self._columns = list(dict.fromkeys([*columns, "worker_id", "sequence", "group_id"]))
        self.cursor = cursor or Cursor()
        self.set_aside: dict[str, str] = {}
        """Broken files and why; they never stop a run."""
        self._groups_left: dict[str, set[str]] = {}
        self._num_arrivals = 0

    def poll(self, versions: range | None) -> pa.Table | None:
        """Rows of groups not yet delivered, of files in these versions (None: in all); None when there is nothing new.

        Raises StoreError when the filesystem fails; the next poll goes on from where this one was.
        """
        new = [file for file in list_files(self._root, versions) if self._is_new(file)]
        if not new:
            return None
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            tables = list(pool.map(self._read, new))
        delivered = [self._deliver(file, table) for file, table in zip(new, tables, strict=True) if table is not None]
        rows = [table for table in delivered if table.num_rows]
        return pa.concat_tables(rows) if rows else None

    def consume(self, rows: pa.Table) -> None:
        """Mark groups as used or dropped for good; `rows` has the columns file and group_id, whole groups only."""
        pairs = rows.select(["file", "group_id"]).group_by("file").aggregate([("group_id", "distinct")])
        for name, group_ids in zip(*(column.to_pylist() for column in pairs.columns), strict=True):
            self._consume_file(name, group_ids)

    def _consume_file(self, name: str, group_ids: Iterable[str]) -> None:
        file = RolloutFile.parse(name)
        assert file is not None
        left = self._groups_left[name]
        left.difference_update(group_ids)
        self.cursor.consume(file.worker_id, file.sequence, group_ids, whole=not left)
        if not left:
            del self._groups_left[name]

    def _is_new(self, file: RolloutFile) -> bool:
        seen = file.name in self._groups_left or file.name in self.set_aside
        return not seen and not self.cursor.has_file(file.worker_id, file.sequence)

    def _read(self, file: RolloutFile) -> pa.Table | None:
        """Scalars with address; None for a file that is broken (set aside) or gone (looked for again)."""
        try:
            where = f"{self._root.url}/{file.name}"
            with open_parquet(self._root, file.name) as parquet:
                counts = row_counts(parquet)
                table = read_row_groups(parquet, range(len(counts)), self._columns, where)
            if table.num_rows == 0:
                raise SchemaError(f"{where} holds no rows; no worker writes such a file")
            return _with_address(table, file.name, counts)
        except FileNotFoundError:
            return None
        except SchemaError as error:
            self.set_aside[file.name] = str(error)
            return None

    def _deliver(self, file: RolloutFile, table: pa.Table) -> pa.Table:
        consumed = self.cursor.groups_of(file.worker_id, file.sequence)
        if consumed:
            known = pa.array(sorted(consumed), pa.string())
            table = table.filter(pc.invert(pc.is_in(table.column("group_id"), value_set=known)))
        self._groups_left[file.name] = set(table.column("group_id").unique().to_pylist())
        arrival = pa.repeat(pa.scalar(self._num_arrivals, pa.int64()), table.num_rows)
        self._num_arrivals += 1
        return table.append_column("arrival", arrival)


def _with_address(table: pa.Table, name: str, row_counts: np.ndarray) -> pa.Table:
    """The rows of a whole file with file, row_group and row. row_counts: (num_row_groups,)."""
    row_groups = np.repeat(np.arange(len(row_counts), dtype=np.int32), row_counts)
    rows = np.concatenate([np.arange(count, dtype=np.int32) for count in row_counts])
    table = table.append_column("file", pa.repeat(pa.scalar(name, pa.string()), table.num_rows))
    return table.append_column("row_group", pa.array(row_groups)).append_column("row", pa.array(rows))
