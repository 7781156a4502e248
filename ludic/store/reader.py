"""Deliver every committed group exactly once, and every request as one group, across crashes and restarts.

The reader lists only the requested versions and reads the scalar columns of files that it has not seen. Its caller
reports which groups were consumed, and the cursor goes into the trainer's checkpoint. The reader counts by source (a
file as a worker committed it): compaction may move rows to another file at any moment, and leave both files for a
while. Every poll looks again at gaps in a worker's sequence, and at files that vanished while they were read. A
broken file is quarantined with the reason.

Two workers of one slot sample the same request (ludic.store.claims). The group that is delivered first gets the
request; later groups are delivered as duplicates, for the planner to drop. Of groups in the same poll, the group
sampled first gets it, whatever the order of the listing.

A worker that outlives a root that was deleted and made again may commit a last file there. Its rows have another
run_id; they are delivered for the planner to drop, and take no request. A cut, and a root that is only a source of
rollouts, may hold rows of any run.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import SchemaError
from ludic.schema import rollouts_schema
from ludic.store.cursor import Cursor
from ludic.store.cut_record import read_cut
from ludic.store.files import RolloutFile, Source, group_numbers, list_names, sources_of
from ludic.store.parquet import group_starts, open_parquet, read_row_groups, row_counts
from ludic.store.root import Root
from ludic.store.small_files import MANY_FILES, SmallFiles, read_small_files

logger = logging.getLogger(__name__)

_OWN_COLUMNS = ("run_id", "worker_id", "sequence", "group_id", "request_index", "group_size", "created_at")

DUPLICATE_REQUEST, OTHER_RUN = "duplicate_request", "other_run"
"""Values of the column `refusal`: another group has the row's request; the row is of another run than the root."""

_CONCURRENT_READS = 8
_FORGET_ABOVE = 1000


class RolloutReader:
    """Reads the scalar columns of new groups, and remembers which groups were consumed."""

    def __init__(
        self, root: Root, columns: Sequence[str], cursor: Cursor | None = None, *, any_run: bool = False
    ) -> None:
        """columns: read for every row, in addition to _OWN_COLUMNS. any_run: take rows of any run as the root's own."""
        self._root, self._any_run = root, any_run
        self._columns = list(dict.fromkeys([*columns, *_OWN_COLUMNS]))
        self._schema = rollouts_schema(root.run.extra_columns)
        self.cursor = cursor or Cursor()
        self.broken_files: dict[str, str] = {}
        """Reason by name of each broken file; broken files never stop a run."""
        self._groups_left: defaultdict[Source, set[str]] = defaultdict(set)
        self._version_of: dict[Source, int] = {}
        """Version of each source in _groups_left."""
        self._sources: defaultdict[str, set[Source]] = defaultdict(set)
        """Sources by group_id, for groups that were delivered and not consumed yet."""
        self._delivered: set[str] = set()
        """Names of files without new groups, so that each is parsed, and a compacted file opened, only once."""
        self._num_arrivals = 0
        self._group_of = dict(self.cursor.in_use)
        """group_id that has the request, by group number of the schedule.

        The group is delivered and not consumed yet, or still to come.
        """
        self._number_of: dict[str, int] = {}
        """Group number by group_id, for groups that were delivered: the reverse of _group_of."""

    def poll(self, versions: range | None) -> pa.Table | None:
        """Return rows of groups not yet delivered, from files of these versions (None: all); None if nothing is new.

        Each row has five more columns: file (path below the root), row_group, row (index in the row group), arrival
        (order in which files were read) and refusal (why no rules may train on it; see DUPLICATE_REQUEST).
        Raises StoreError if the filesystem fails; the next poll reads the same files again.
        """
        new = self._new_files(versions)
        if not new:
            return None
        arrivals = {file: self._num_arrivals + index for index, file in enumerate(new)}
        self._num_arrivals += len(new)
        reads = list(self._read(new))  # all of them before the first is delivered: a read that fails loses nothing
        found = [rows for read in reads if (rows := self._deliver(read, arrivals)).num_rows]
        if not found:
            return None
        rows = pa.concat_tables(found)
        is_foreign = self._is_foreign(rows)
        is_duplicate = pc.is_in(rows["group_id"], self._duplicates(rows.filter(pc.invert(is_foreign))))
        no_reason = pa.scalar(None, pa.string())
        refusal = pc.if_else(is_foreign, OTHER_RUN, pc.if_else(is_duplicate, DUPLICATE_REQUEST, no_reason))
        return rows.append_column("refusal", refusal)

    def use(self, rows: pa.Table) -> None:
        """Note that a step considered these groups: each keeps its request if delivered again. rows: see `consume`."""
        for group_id in rows.column("group_id").unique().to_pylist():
            if group_id in self._number_of:
                self.cursor.use_request(self._number_of[group_id], group_id)

    def consume(self, rows: pa.Table, *, forgets: bool = False) -> None:
        """Mark groups as used or dropped for good. rows: has the column group_id; whole groups only.

        forgets: the trainer has a window of versions, and calls `forget_before` as the window moves.
        """
        for group_id in rows.column("group_id").unique().to_pylist():
            for source in self._sources.pop(group_id):
                left = self._groups_left[source]
                left.discard(group_id)
                version = self._version_of[source]
                self.cursor.consume(*source, [group_id], whole=not left, version=version if forgets else None)
                if not left:
                    del self._groups_left[source], self._version_of[source]
            if group_id in self._number_of:
                number = self._number_of.pop(group_id)
                del self._group_of[number]
                self.cursor.finish_request(number)

    def forget_before(self, version: int) -> None:
        """Deliver no files of older versions from now on, and let the cursor forget them."""
        self.cursor.forget_before(version)

    def _new_files(self, versions: range | None) -> list[RolloutFile]:
        first = self.cursor.first_version
        if versions is not None:
            versions = range(max(first, versions.start), versions.stop)
        names = list_names(self._root, versions)
        if len(self._delivered) > 2 * len(names) + _FORGET_ABOVE:
            self._delivered.intersection_update(names)
        unseen = (RolloutFile.parse(name) for name in names if name not in self._delivered)
        return sorted(file for file in unseen if file is not None and file.version >= first and self._is_new(file))

    def _is_new(self, file: RolloutFile) -> bool:
        # A compacted file that was stored broken may be written again; a worker's file never is.
        if file.is_compacted:
            return True
        if self._has_source(file.source):
            self._delivered.add(file.name)
            return False
        return file.name not in self.broken_files

    def _has_source(self, source: Source) -> bool:
        """Return whether a source was delivered in this life, or consumed in an earlier life."""
        return source in self._groups_left or self.cursor.has_source(*source)

    def _read(self, new: Sequence[RolloutFile]) -> Iterator[SmallFiles]:
        """Yield scalar columns with addresses; many small files in one pass, and other files one by one."""
        left = dict.fromkeys(new)
        if len(new) > MANY_FILES:
            for small in read_small_files(self._root, [file for file in new if not file.is_compacted], self._columns):
                for file in small.files:
                    del left[file]
                    self.broken_files.pop(file.name, None)
                names = small.column([file.name for file in small.files])
                table = _with_address(small.table, names, np.zeros(len(names), np.int32), small.rows)
                yield replace(small, table=table)
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            for file, table in zip(left, pool.map(self._read_file, left), strict=True):
                if table is not None:
                    yield SmallFiles([file], np.array([table.num_rows]), table)

    def _read_file(self, file: RolloutFile) -> pa.Table | None:
        """Return scalar columns with addresses; None if the file is broken (quarantined) or gone (looked for again)."""
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
            self.broken_files[file.name] = str(error)
            return None
        self.broken_files.pop(file.name, None)
        names = pa.repeat(pa.scalar(file.name, pa.string()), table.num_rows)
        row_groups = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        rows = np.concatenate([np.arange(count, dtype=np.int32) for count in (0, *counts)])
        return _with_address(table, names, row_groups, rows)

    def _deliver(self, read: SmallFiles, arrivals: Mapping[RolloutFile, int]) -> pa.Table:
        """Return the rows of new groups, and record those groups as delivered."""
        table, counts, stop = read.table, read.row_counts, 0
        group_ids = table.column("group_id").to_pylist()
        is_new = np.zeros(table.num_rows, np.bool_)
        for file, count in zip(read.files, counts.tolist(), strict=True):
            start, stop = stop, stop + count
            sources = _row_sources(file, table.slice(start, count) if file.is_compacted else table)
            pairs = list(zip(sources, group_ids[start:stop], strict=False))
            is_new[start:stop] = self._record_new(pairs, file.version)
            self._delivered.add(file.name)
        table = table.append_column("arrival", pa.array(np.repeat([arrivals[file] for file in read.files], counts)))
        return table if is_new.all() else table.filter(pa.array(is_new))

    def _record_new(self, pairs: Sequence[tuple[Source, str]], version: int) -> bool | list[bool]:
        """Record the new groups of a file as delivered; returns for each row whether its group is new.

        pairs: source and group_id of each row.
        """
        groups = dict.fromkeys(pairs)
        new = {(source, group_id) for source, group_id in groups if self._is_undelivered(source, group_id)}
        for source, group_id in new:
            self._groups_left[source].add(group_id)
            self._version_of[source] = version
            self._sources[group_id].add(source)
        return True if len(new) == len(groups) else [pair in new for pair in pairs]

    def _is_foreign(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return whether each row is of another run than the root; warns of such rows."""
        is_foreign = pc.fill_null(pc.not_equal(rows["run_id"], self._root.run_id), False)
        if pc.any(is_foreign).as_py() and (self._any_run or read_cut(self._root) is not None):
            is_foreign = pc.and_(is_foreign, False)
        for run_id in rows.filter(is_foreign)["run_id"].unique().to_pylist():
            of_run = rows.filter(pc.equal(rows["run_id"], run_id))
            logger.warning(
                "%s: %d rollouts of %s are of another run, %s, and are not trained on; was the root deleted and made "
                "again while a worker of that run went on?",
                *(self._root.url, of_run.num_rows, ", ".join(of_run["worker_id"].unique().to_pylist()), run_id),
            )
        return is_foreign

    def _duplicates(self, rows: pa.Table) -> pa.Array:
        """Give requests to new groups; return the group_ids whose request another group has."""
        if not rows.num_rows:
            return pa.array([], pa.string())
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
    """Return the source of each row: num_rows sources, or one source repeated without end."""
    if not file.is_compacted:
        return repeat(file.source)
    return map(Source, table.column("worker_id").to_pylist(), table.column("sequence").to_pylist())


def _with_address(table: pa.Table, names: pa.Array, row_groups: np.ndarray, rows: np.ndarray) -> pa.Table:
    """Add the columns file, row_group and row to rows."""
    table = table.append_column("file", names)
    return table.append_column("row_group", pa.array(row_groups)).append_column("row", pa.array(rows))
