"""Deliver every committed group exactly once, and every request as one group, across crashes and restarts.

The reader lists only the versions that it is asked for, reads the scalar columns of files it has not
seen, and is told which groups were consumed; its cursor goes into the trainer's checkpoint. What counts is the
source of a row, what its worker committed as one file: compaction may move it to another file at any moment, and
leave both for a while. Gaps in a worker's sequence are looked at again at every poll, and so is a file that
vanished under the reader's hands. A broken file is set aside with its reason.

Two workers of one slot sample the same request (ludic.store.slots). The group that is delivered first has it; what
comes after that is delivered as a duplicate, for the planner to drop. Of groups that come at once, the one sampled
first has it, whatever the order of the listing.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import SchemaError
from ludic.schema import rollouts_schema
from ludic.store.cursor import Cursor
from ludic.store.encoding import group_starts
from ludic.store.files import RolloutFile, Source, list_names
from ludic.store.parquet import open_parquet, read_row_groups, row_counts
from ludic.store.requests import group_numbers
from ludic.store.root import Root
from ludic.store.sources import sources_of

_OWN_COLUMNS = ("worker_id", "sequence", "group_id", "request_index", "group_size", "created_at")

_CONCURRENT_READS = 8
_FORGET_ABOVE = 1000


class RolloutReader:
    """Reads scalars of new groups, and remembers what was consumed."""

    def __init__(self, root: Root, columns: Sequence[str], cursor: Cursor | None = None) -> None:
        """`columns` are read of every row, with _OWN_COLUMNS in any case."""
        self._root = root
        self._columns = list(dict.fromkeys([*columns, *_OWN_COLUMNS]))
        self._schema = rollouts_schema(root.run.extra_columns)
        self.cursor = cursor or Cursor()
        self.set_aside: dict[str, str] = {}
        """Broken files and why; they never stop a run."""
        self._groups_left: defaultdict[Source, set[str]] = defaultdict(set)
        self._sources: defaultdict[str, set[Source]] = defaultdict(set)
        """Of the groups that were delivered and not consumed yet, by group_id."""
        self._delivered: set[str] = set()
        """Names of files that hold nothing new: each is parsed, and a compacted one opened, only once."""
        self._num_arrivals = 0
        self._group_of = dict(self.cursor.in_use)
        """By group number of the schedule, who has the request: delivered and not consumed yet, or still to come."""
        self._number_of: dict[str, int] = {}
        """The other way round, of those that were delivered."""

    def poll(self, versions: range | None) -> pa.Table | None:
        """Rows of groups not yet delivered, of files in these versions (None: in all); None when there is nothing new.

        Each row has five more columns: file, its path below the root; row_group; row, its place in that; arrival, in
        which order files were read; is_duplicate, whether its request is another group's.
        Raises StoreError when the filesystem fails; the next poll goes on from where this one was.
        """
        new = self._new_files(versions)
        if not new:
            return None
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            tables = list(pool.map(self._read, new))
        delivered = [self._deliver(file, table) for file, table in zip(new, tables, strict=True) if table is not None]
        found = [table for table in delivered if table.num_rows]
        if not found:
            return None
        rows = pa.concat_tables(found)
        return rows.append_column("is_duplicate", pc.is_in(rows["group_id"], self._duplicates(rows)))

    def use(self, rows: pa.Table) -> None:
        """Note that a step considered groups: their requests are theirs, even if they come again; as `consume`."""
        for group_id in rows.column("group_id").unique().to_pylist():
            if group_id in self._number_of:
                self.cursor.use_request(self._number_of[group_id], group_id)

    def consume(self, rows: pa.Table) -> None:
        """Mark groups as used or dropped for good; `rows` has the column group_id, whole groups only."""
        for group_id in rows.column("group_id").unique().to_pylist():
            for source in self._sources.pop(group_id):
                left = self._groups_left[source]
                left.discard(group_id)
                self.cursor.consume(*source, [group_id], whole=not left)
                if not left:
                    del self._groups_left[source]
            if group_id in self._number_of:
                number = self._number_of.pop(group_id)
                del self._group_of[number]
                self.cursor.finish_request(number)

    def _new_files(self, versions: range | None) -> list[RolloutFile]:
        names = list_names(self._root, versions)
        if len(self._delivered) > 2 * len(names) + _FORGET_ABOVE:
            self._delivered.intersection_update(names)
        unseen = (RolloutFile.parse(name) for name in names if name not in self._delivered)
        return sorted(file for file in unseen if file is not None and self._is_new(file))

    def _is_new(self, file: RolloutFile) -> bool:
        # A compacted file that was stored broken may be written again; a worker's never is.
        if file.is_compacted:
            return True
        if self._has_source(file.source):
            self._delivered.add(file.name)
            return False
        return file.name not in self.set_aside

    def _has_source(self, source: Source) -> bool:
        """Whether a source was delivered to this life, or consumed by an earlier one."""
        return source in self._groups_left or self.cursor.has_source(*source)

    def _read(self, file: RolloutFile) -> pa.Table | None:
        """Scalars with address; None for a file that is broken (set aside) or gone (looked for again)."""
        try:
            where = f"{self._root.url}/{file.name}"
            with open_parquet(self._root, file.name) as parquet:
                is_old = all(map(self._has_source, sources_of(parquet, file)))
                counts = row_counts(parquet)[: 0 if is_old else None]
                table = read_row_groups(parquet, range(len(counts)), self._columns, where, self._schema)
            if table.num_rows == 0 and not is_old:
                raise SchemaError(f"{where} holds no rows; no worker writes such a file")
        except FileNotFoundError:
            return None
        except SchemaError as error:
            self.set_aside[file.name] = str(error)
            return None
        self.set_aside.pop(file.name, None)
        return _with_address(table, file.name, counts)

    def _deliver(self, file: RolloutFile, table: pa.Table) -> pa.Table:
        """The rows of groups that are new, which are then known."""
        pairs = list(zip(_row_sources(file, table), table.column("group_id").to_pylist(), strict=False))
        new = {
            (source, group_id) for source, group_id in dict.fromkeys(pairs) if self._is_undelivered(source, group_id)
        }
        for source, group_id in new:
            self._groups_left[source].add(group_id)
            self._sources[group_id].add(source)
        if len(new) < len(set(pairs)):
            table = table.filter(pa.array([pair in new for pair in pairs], pa.bool_()))
        self._delivered.add(file.name)
        arrival = pa.repeat(pa.scalar(self._num_arrivals, pa.int64()), table.num_rows)
        self._num_arrivals += 1
        return table.append_column("arrival", arrival)

    def _duplicates(self, rows: pa.Table) -> pa.Array:
        """group_ids of new groups whose request is another group's."""
        groups = rows.select(_OWN_COLUMNS).take(pa.array(group_starts(rows)))
        groups = groups.sort_by([(name, "ascending") for name in ("created_at", "worker_id", "sequence", "group_id")])
        numbers, group_ids = group_numbers(groups).tolist(), groups.column("group_id").to_pylist()
        lost = [
            group_id
            for number, group_id in zip(numbers, group_ids, strict=True)
            if number >= 0 and not self._takes_request(number, group_id)
        ]
        return pa.array(lost, pa.string())

    def _takes_request(self, number: int, group_id: str) -> bool:
        if number in self.cursor.requests or self._group_of.setdefault(number, group_id) != group_id:
            return False
        self._number_of[group_id] = number
        return True

    def _is_undelivered(self, source: Source, group_id: str) -> bool:
        return source not in self._groups_left and not self.cursor.has_group(*source, group_id)


def _row_sources(file: RolloutFile, table: pa.Table) -> "repeat[Source] | map[Source]":
    """Of each row, (num_rows,) or without end."""
    if not file.is_compacted:
        return repeat(file.source)
    return map(Source, table.column("worker_id").to_pylist(), table.column("sequence").to_pylist())


def _with_address(table: pa.Table, name: str, row_counts: np.ndarray) -> pa.Table:
    """The rows of a whole file with file, row_group and row. row_counts: (num_row_groups,)."""
    row_groups = np.repeat(np.arange(len(row_counts), dtype=np.int32), row_counts)
    rows = np.concatenate([np.arange(count, dtype=np.int32) for count in (0, *row_counts)])
    table = table.append_column("file", pa.repeat(pa.scalar(name, pa.string()), table.num_rows))
    return table.append_column("row_group", pa.array(row_groups)).append_column("row", pa.array(rows))
