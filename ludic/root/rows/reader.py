"""Deliver each committed group of rollouts once, as it arrives, and keep a cursor of the consumed groups."""

import bisect
import io
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import LudicError, SchemaError
from ludic.records import TABLE_KEY, VERSION_KEY, as_schema, rollouts_schema
from ludic.root.attempts import read_cut
from ludic.root.json_records import IMPORTED_BY
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, SourceFile, group_numbers, list_names, sources_of
from ludic.root.rows.parquet import CAPTURE, group_starts, open_parquet, read_row_groups, row_counts, sound_footer

# --- Cursor ---------------------------------------------------------------------------------------------------
# A reader's cursor: the sources, groups of partly used sources, and requests that a trainer has consumed.
#
# A source is the rows that a worker committed as one file, whatever file holds them now. It is named by worker_id and
# a sequence number that the worker counts up, so consumed sources are a set of intervals for each worker, however many
# there are. A request is named by its group's number in the schedule. Numbers are dense, so a set of them is a few
# intervals, too. The cursor is stored in the checkpoint.
#
# A trainer with a window of versions never reads older versions again, so its cursor forgets their sources. If a later
# trainer reads them, `recall_sources` restores the consumed groups from the ledger.


class Intervals:
    """A set of integers of at least 0, held as disjoint half-open intervals [start, stop) in order."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in pairs:
            self._starts.append(start)
            self._stops.append(stop)

    def __contains__(self, number: int) -> bool:
        index = bisect.bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def __len__(self) -> int:
        """Number of integers, not of intervals."""
        return sum(self._stops) - sum(self._starts)

    def add(self, number: int) -> None:
        """Add a number, and join the intervals that it touches."""
        if number in self:
            return
        index = bisect.bisect_right(self._starts, number)
        joins_left = index > 0 and self._stops[index - 1] == number
        joins_right = index < len(self._starts) and self._starts[index] == number + 1
        if joins_left and joins_right:
            self._stops[index - 1] = self._stops.pop(index)
            del self._starts[index]
        elif joins_left:
            self._stops[index - 1] = number + 1
        elif joins_right:
            self._starts[index] = number
        else:
            self._starts.insert(index, number)
            self._stops.insert(index, number + 1)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))

    @property
    def distances(self) -> list[int]:
        """The bounds of all intervals in order, each as the distance from the bound before: a quarter of the text."""
        bounds = [bound for pair in zip(self._starts, self._stops, strict=True) for bound in pair]
        return [bound - before for before, bound in zip([0, *bounds], bounds, strict=False)]

    @classmethod
    def from_distances(cls, distances: Iterable[int]) -> "Intervals":
        bounds = list(accumulate(distances))
        return cls(zip(bounds[::2], bounds[1::2], strict=True))


class _Consumed:
    """Consumed sources, groups and requests of some versions."""

    def __init__(self) -> None:
        self.files: dict[str, Intervals] = {}
        """Sequences of sources, by worker_id."""
        self.groups: dict[tuple[str, int], set[str]] = {}
        """group_ids of partly used sources."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "files": {worker: intervals.pairs for worker, intervals in sorted(self.files.items())},
            "groups": [[worker, sequence, sorted(ids)] for (worker, sequence), ids in sorted(self.groups.items())],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "_Consumed":
        consumed = cls()
        consumed.files = {worker: Intervals(map(tuple, pairs)) for worker, pairs in state["files"].items()}
        consumed.groups = {(worker, sequence): set(ids) for worker, sequence, ids in state["groups"]}
        return consumed


class Cursor:
    """Set of consumed sources (as intervals by worker), groups of partly used sources, and requests."""

    def __init__(self) -> None:
        self._consumed: dict[int | None, _Consumed] = {None: _Consumed()}
        """Consumed data by version; under None if the version is unknown or the trainer has no window of versions."""
        self.first_version = 0
        """First version that the cursor knows; see `forget_before`."""
        self.requests = Intervals()
        """Group numbers of the schedule whose group was consumed; no other group may use them."""
        self.in_use: dict[int, str] = {}
        """Group numbers that a step considered, with the group_id of their group, which is to be delivered again."""
        self.knows_requests = True
        """False for the cursor of an older ludic, until `recall_requests` has found the requests."""

    def has_source(self, worker_id: str, sequence: int) -> bool:
        """Return whether every group of the source is consumed."""
        return any(sequence in consumed.files.get(worker_id, _EMPTY) for consumed in self._consumed.values())

    def has_group(self, worker_id: str, sequence: int, group_id: str) -> bool:
        """Return whether this group of the source is consumed."""
        source = worker_id, sequence
        is_used = any(group_id in consumed.groups.get(source, ()) for consumed in self._consumed.values())
        return is_used or self.has_source(*source)

    def consume(
        self, worker_id: str, sequence: int, group_ids: Iterable[str], *, whole: bool, version: int | None = None
    ) -> None:
        """Add groups of one source. With `whole`, no group of it is left, and it becomes a number in an interval.

        version: of the source's partition, for a cursor that is to forget it; None keeps it forever.
        """
        if version is not None and version < self.first_version:
            return
        into = self._consumed.setdefault(version, _Consumed())
        if whole:
            for consumed in self._consumed.values():
                consumed.groups.pop((worker_id, sequence), None)
            into.files.setdefault(worker_id, Intervals()).add(sequence)
        else:
            into.groups.setdefault((worker_id, sequence), set()).update(group_ids)

    def forget_before(self, version: int) -> None:
        """Forget the sources of older versions, which must never be delivered again from this cursor."""
        self.first_version = max(self.first_version, version)
        self._consumed = {
            key: consumed for key, consumed in self._consumed.items() if key is None or key >= self.first_version
        }

    def use_request(self, number: int, group_id: str) -> None:
        """Assign a request to a group; does nothing if the request is consumed or has a group already."""
        if number not in self.requests:
            self.in_use.setdefault(number, group_id)

    def finish_request(self, number: int) -> None:
        """Mark a request as consumed, so that no other group may use it."""
        self.in_use.pop(number, None)
        self.requests.add(number)

    def to_dict(self) -> dict[str, Any]:
        """Return the cursor as values for JSON."""
        state = self._consumed[None].to_dict()
        versions = {str(key): consumed.to_dict() for key, consumed in self._consumed.items() if key is not None}
        if versions or self.first_version:
            state |= {"versions": versions, "first_version": self.first_version}
        if self.knows_requests:
            state |= {"requests": self.requests.distances, "in_use": sorted(self.in_use.items())}
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "Cursor":
        """Load a cursor, also one of an older ludic, which has no versions, and requests as pairs or none."""
        cursor = cls()
        versions = state.get("versions", {})
        cursor._consumed = {int(version): _Consumed.from_dict(consumed) for version, consumed in versions.items()}
        cursor._consumed[None] = _Consumed.from_dict(state)
        cursor.first_version = state.get("first_version", 0)
        cursor.knows_requests = "requests" in state
        requests = state.get("requests", [])
        is_older = any(isinstance(each, Sequence) for each in requests[:1])
        cursor.requests = Intervals(map(tuple, requests)) if is_older else Intervals.from_distances(requests)
        cursor.in_use = dict(state.get("in_use", ()))
        return cursor


_EMPTY = Intervals()


# --- Many small files -----------------------------------------------------------------------------------------
# Read columns of many small files of workers in one pass: 0.5 ms a file in Polars instead of 2 ms in pyarrow.
#
# A file is read here only if all its bytes match its digests, its footer has the schema of a file that `open_parquet`
# accepted, and it has one row group. All other files (large, damaged, without digests, written by another program,
# deleted, or imported before rollouts 1.8, see with_capture) are left out: the caller reads them one by one, with all
# checks and errors.


MANY_FILES = 64
"""Number of files above which one pass is worth the import of Polars, which takes 0.2 s."""

_LARGEST_BYTES = 1 << 20
"""Maximum size of a file that is read whole; opening a remote file fetches as much anyway."""
_BATCH_BYTES = 16 << 20
_LARGEST_ROWS = 1 << 16
"""Maximum rows of a file that is read whole, and bytes in memory that a row counts for: rows may be stored once."""
_ROW_BYTES = 64
_LOCAL, _REMOTE = (2, 256), (32, 32)
"""Number of threads, and of files that a thread reads at once: Polars keeps about one core busy."""
# Thrift, in a footer just after the schema: num_rows, an i64, and the head of a list with one row group.
_NAME_OF_CAPTURE = bytes([len(CAPTURE)]) + CAPTURE.encode()
"""The column's name there, and not that of a run's own column that ends like it."""
_NUM_ROWS = re.compile(rb"\x16([\x80-\xff]*[\x00-\x7f])\x19\x1c", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """Rows of some files, in the order of the files."""

    files: Sequence[RolloutFile]
    row_counts: np.ndarray
    """(num_files,) int64, all positive."""
    table: pa.Table

    def column(self, values: Sequence[Any]) -> pa.Array:
        """Return a column with one of `values` in each row: that of the row's file. values: one for each file."""
        return pa.array(values).take(pa.array(np.repeat(np.arange(len(self.files)), self.row_counts)))

    @property
    def rows(self) -> np.ndarray:
        """(num_rows,) int32: the index of each row in its file."""
        starts = np.cumsum(self.row_counts) - self.row_counts
        return (np.arange(self.table.num_rows) - np.repeat(starts, self.row_counts)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Content:
    file: RolloutFile
    data: bytes
    num_rows: int


_Heads = Mapping[bytes, Sequence[bytes]]
"""Bytes that a footer must contain, by its first bytes."""


def read_small_files(root: Root, files: Sequence[RolloutFile], columns: Sequence[str]) -> Iterator[SmallFiles]:
    """Yield columns of the files that one pass can read, in their order; none if a column is nested.

    Each of these files has one row group. The columns have the types of the run's schema; a column that a file of an
    older schema lacks is null. files: of workers, not compacted. Raises StoreError if the filesystem fails.
    """
    schema = rollouts_schema(root.extra_columns)
    wanted = pa.schema([schema.field(column) for column in columns])
    heads = {} if any(map(pa.types.is_nested, wanted.types)) else _known_heads(root, files)
    num_threads, most = _LOCAL if root.is_local else _REMOTE
    batches = [files[start : start + most] for start in range(0, len(files) if heads else 0, most)]
    with ThreadPoolExecutor(num_threads) as pool:
        # A few batches at a time, so that results do not pile up in memory.
        for start in range(0, len(batches), 2 * num_threads):
            some = batches[start : start + 2 * num_threads]
            for found in pool.map(lambda batch: list(_read_batch(root, batch, heads, wanted)), some):
                yield from found


def _known_heads(root: Root, files: Sequence[RolloutFile]) -> dict[bytes, list[bytes]]:
    """Return the heads of a few files that `open_parquet` accepts; a run has few different schemas."""
    heads = {}
    for file in {files[0], files[len(files) // 2], files[-1]} if files else ():
        try:
            head, num_rows = _parse_head(sound_footer(_read_if_small(root, file) or b"") or b"")
            with open_parquet(root, file.name) as parquet:
                metadata = parquet.metadata
        except (LudicError, FileNotFoundError):
            continue
        if num_rows == metadata.num_rows and metadata.num_row_groups == 1:
            heads[head] = [_entry(key, metadata.metadata[key]) for key in (TABLE_KEY, VERSION_KEY)]
    return heads


def _parse_head(footer: bytes) -> tuple[bytes, int]:
    """Return the start of a footer, up to its schema, and num_rows; empty and 0 if there is not one row group."""
    match = _NUM_ROWS.search(footer)
    if match is None:
        return b"", 0
    return footer[: match.start()], sum((byte & 0x7F) << 7 * index for index, byte in enumerate(match[1])) >> 1


def _entry(key: bytes, value: bytes) -> bytes:
    """Return the bytes of an entry of a footer's metadata in Thrift, for a value of less than 128 bytes."""
    return key + b"\x18" + bytes([len(value)]) + value


def _read_if_small(root: Root, file: RolloutFile) -> bytes | None:
    """Read a whole file; returns None if it is too large or gone."""
    try:
        with root.explained(file.name), root.open_file(file.name) as source:
            if source.seek(0, io.SEEK_END) > _LARGEST_BYTES:
                return None
            source.seek(0)
            return source.read()
    except FileNotFoundError:
        return None


def _load(root: Root, file: RolloutFile, heads: _Heads) -> _Content | None:
    """Read a whole file; returns None if it has to be read on its own."""
    data = _read_if_small(root, file)
    footer = sound_footer(data or b"") or b""
    head, num_rows = _parse_head(footer)
    is_known = head in heads and all(entry in footer for entry in heads[head])
    if file.worker_id.startswith(IMPORTED_BY) and _NAME_OF_CAPTURE not in head:
        return None
    return _Content(file, data, num_rows) if data is not None and is_known and 0 < num_rows <= _LARGEST_ROWS else None


def _read_batch(root: Root, files: Sequence[RolloutFile], heads: _Heads, wanted: pa.Schema) -> Iterator[SmallFiles]:
    loaded = (_load(root, file, heads) for file in files)
    for batch in _bounded(content for content in loaded if content is not None):
        table = _parse(batch, wanted)
        if table is not None:
            counts = np.array([content.num_rows for content in batch], np.int64)
            yield SmallFiles([content.file for content in batch], counts, table)


def _bounded(contents: Iterator[_Content]) -> Iterator[list[_Content]]:
    """Split into batches of about _BATCH_BYTES at most."""
    batch: list[_Content] = []
    num_bytes = 0
    for content in contents:
        batch.append(content)
        num_bytes += len(content.data) + _ROW_BYTES * content.num_rows
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _parse(batch: Sequence[_Content], wanted: pa.Schema) -> pa.Table | None:
    """Return columns of all rows of a batch; returns None if a file has to be read on its own."""
    import polars as pl  # imported here, since a run of few files does not need it

    empty = pl.from_arrow(wanted.empty_table())
    assert isinstance(empty, pl.DataFrame)
    try:
        frame = (
            pl.scan_parquet(
                [content.data for content in batch],
                schema=empty.schema,
                hive_partitioning=False,
                missing_columns="insert",
                extra_columns="ignore",
            )
            .collect()
            .rechunk()
        )
    except pl.exceptions.PolarsError:
        return None
    nulls = frame.null_count().row(0)
    if frame.height != sum(content.num_rows for content in batch) or any(
        count and not field.nullable for count, field in zip(nulls, wanted, strict=True)
    ):
        return None
    return as_schema(frame.to_arrow(), wanted, "a scan of several files")


# --- Reader ---------------------------------------------------------------------------------------------------
# Deliver every committed group exactly once, and every request as one group, across crashes and restarts.
#
# The reader lists only the requested versions and reads the scalar columns of files that it has not seen. Its caller
# reports which groups were consumed, and the cursor goes into the trainer's checkpoint. The reader counts by source (a
# file as a worker committed it): compaction may move rows to another file at any moment, and leave both files for a
# while. Every poll checks again gaps in a worker's sequence, and files that vanished while they were read. A broken
# file is quarantined with the reason.
#
# Two workers of one slot sample the same request (ludic.root.claims). The group that is delivered first gets the
# request; later groups are delivered as duplicates, for the planner to drop. Of groups in the same poll, the group
# sampled first gets it, whatever the order of the listing.
#
# A worker that outlives a root that was deleted and created again may commit a last file there. Its rows have another
# run_id; they are delivered for the planner to drop, and take no request. A cut, and a root that is only a source of
# rollouts, may hold rows of any run.


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
        self._schema = rollouts_schema(root.extra_columns)
        self.cursor = cursor or Cursor()
        self.broken_files: dict[str, str] = {}
        """Reason by name of each broken file; broken files never stop a run."""
        self._groups_left: defaultdict[SourceFile, set[str]] = defaultdict(set)
        self._version_of: dict[SourceFile, int] = {}
        """Version of each source in _groups_left."""
        self._sources: defaultdict[str, set[SourceFile]] = defaultdict(set)
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
        reads = list(self._read(new))  # read all before the first is delivered, so that a failed read loses nothing
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

    def _has_source(self, source: SourceFile) -> bool:
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
            read = map if len(left) == 1 else pool.map  # a thread takes as long to start as a small file to read
            for file, table in zip(left, read(self._read_file, left), strict=True):
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
                raise SchemaError(f"{where} holds no rows, so no worker wrote it")
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

    def _record_new(self, pairs: Sequence[tuple[SourceFile, str]], version: int) -> bool | list[bool]:
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
                "%s: %d rollouts of %s are of another run, %s, and are not trained on; was the root deleted and "
                "created again while a worker of that run continued?",
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

    def _is_undelivered(self, source: SourceFile, group_id: str) -> bool:
        return source not in self._groups_left and not self.cursor.has_group(*source, group_id)


def _row_sources(file: RolloutFile, table: pa.Table) -> "repeat[SourceFile] | map[SourceFile]":
    """Return the source of each row: num_rows sources, or one source repeated without end."""
    if not file.is_compacted:
        return repeat(file.source)
    return map(SourceFile, table.column("worker_id").to_pylist(), table.column("sequence").to_pylist())


def _with_address(table: pa.Table, names: pa.Array, row_groups: np.ndarray, rows: np.ndarray) -> pa.Table:
    """Add the columns file, row_group and row to rows."""
    table = table.append_column("file", names)
    return table.append_column("row_group", pa.array(row_groups)).append_column("row", pa.array(rows))
