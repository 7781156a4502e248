"""List the files behind `rollouts` and `evals` of a connection, at the first query, and keep the list until a refresh.

The scalars of workers' files are cached in segments; lists, structs and maps are read when a query uses them. Reads the
root. Many files are cached in the user's cache folder (LUDIC_CACHE_DIR overrides it), few files in a temporary folder
that is deleted with the connection. An unreadable file is left out with a warning. Raises StoreError if the root can't
be read.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ludic.base import cache_folder as user_cache
from ludic.base import folder_of_object
from ludic.errors import LudicError, SchemaError, StoreError
from ludic.records import rollouts_schema
from ludic.root.root import Root
from ludic.root.rows.files import Folder, RolloutFile, current_files, list_names
from ludic.root.rows.ledger import read_rollouts
from ludic.root.rows.parquet import open_parquet, read_row_groups, row_counts
from ludic.root.rows.reader import MANY_FILES, SmallFiles, read_small_files

logger = logging.getLogger(__name__)

FEW_FILES = 64
"""Up to this number of files are read again for each connection, in 0.1 s, so that a small run leaves no cache
behind."""

_MOST_LISTINGS = 10
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """Files that serve one folder: together they hold each of its rows once."""

    segments: Sequence[Path] = ()
    """Files on this machine with the scalars of workers' files."""
    compacted: Sequence[RolloutFile] = ()


class Snapshot:
    """The files of a root, as of the first query after the last `refresh`. Threads may share a snapshot."""

    def __init__(self, root: Root, without: Collection[str] = ()) -> None:
        """Create an empty snapshot, until the first `refresh`. without: names of files to leave out."""
        self.has_begun = False
        """True if the snapshot lists files at all."""
        self._root, self._without = root, frozenset(without)
        self._lock = threading.Lock()
        self._stored: dict[Folder, Stored] = {"rollouts": Stored(), "evals": Stored()}
        self._private: Path | None = None

    def refresh(self) -> None:
        """List the files again at the next query."""
        with self._lock:
            self.has_begun = True
            self._stored.clear()

    def renew(self) -> None:
        """List the files again now; queries see the old list until the new one is complete."""
        with self._lock:
            folders = list(self._stored)
        found = {folder: self._look(folder) for folder in folders}
        with self._lock:
            self._stored |= found

    def stored(self, folder: Folder) -> Stored:
        """Return the files that serve a folder."""
        with self._lock:
            if folder not in self._stored:
                self._stored[folder] = self._look(folder)
            return self._stored[folder]

    def folders(self) -> list[Path]:
        """Return the folders of this machine that hold segments, now or later."""
        return [cache_folder(self._root), self._private_folder()]

    def _look(self, folder: Folder) -> Stored:
        for _ in range(_MOST_LISTINGS):
            files = [file for file in current_files(self._root, folder) if file.name not in self._without]
            scalars = self._update([file for file in files if not file.is_compacted], folder)
            # A file that vanished was compacted or has expired: list the files again.
            if not scalars.gone:
                if broken := sorted(scalars.broken):
                    names = ", ".join([*broken[:_MOST_NAMES], *(["..."] if len(broken) > _MOST_NAMES else [])])
                    logger.warning(
                        "left out files that can't be read: %s; `ludic verify %s` shows why", names, self._root.url
                    )
                return Stored(scalars.segments, [file for file in files if file.is_compacted])
        raise StoreError(f"{self._root.url}: files keep vanishing while they are read, such as {scalars.gone[0]}")

    def _update(self, files: Sequence[RolloutFile], folder: Folder) -> "Scalars":
        if len(files) > FEW_FILES:
            shared = cache_folder(self._root) / folder
            try:
                return update_segments(self._root, files, shared)
            except StoreError:
                raise
            except OSError as error:
                logger.warning("can't cache scalars in %s, so each connection reads them again: %s", shared, error)
        return update_segments(self._root, files, self._private_folder() / folder)

    def _private_folder(self) -> Path:
        if self._private is None:
            self._private = folder_of_object("scalars", self)
        return self._private


def count_rows(root: Root, folder: Folder) -> dict[str, int]:
    """Return the number of rows of each readable file of workers by name, from cached scalars; empty for few files.

    New files are read into the cache, where the next connection finds them. Raises StoreError.
    """
    if len(list_names(root, folder=folder)) <= FEW_FILES:
        return {}
    snapshot = Snapshot(root)
    snapshot.refresh()
    counts: dict[str, int] = {}
    for path in snapshot.stored(folder).segments:
        names = pq.read_table(path, columns=["file"])["file"].value_counts()
        counts |= zip(names.field("values").to_pylist(), names.field("counts").to_pylist(), strict=True)
    return counts


def cache_folder(root: Root) -> Path:
    """Return the folder that caches a run's scalars between connections; a copy of the run has another folder."""
    digest = hashlib.sha256(root.fs.unstrip_protocol(root.path).encode()).hexdigest()[:16]
    return user_cache() / "scalars" / f"{root.run_id}-{digest}"


# --- Segments: scalars on this machine -----------------------------------------------------------------
# A worker's file never changes, so its scalars are read once. A segment, {folder}/{uuid4}.parquet, has the scalar
# columns, the partition (version, env) and the address (file, row_group, row) of all rows of the files that its footer
# names. A segment appears complete and never changes, and its data can be read again. So several processes may share a
# folder without a lock, and damaged or foreign segments are ignored. Raises OSError if the folder can't be written.

ADDRESS = ("file", "row_group", "row")
"""Columns that locate a row: path below the root, row group, and row in the row group."""

SEGMENT_FILES = 2048
_SEGMENT_ROW_GROUP = 1 << 16
_MOST_SMALL_SEGMENTS = 16
"""More segments than this with less than half of SEGMENT_FILES are merged; so a row is written a few times at most."""
_IN_USE_S = 24 * 3600
"""Seconds that a replaced segment is kept after its last use, since a connection may still query it."""
_FILES_KEY = b"ludic.files"
_MANY_FILES = 1000
_SAME = attrgetter("version"), attrgetter("env_name"), attrgetter("name")
"""Values of a file that are columns of a segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A file on this machine with the scalars of whole files."""

    path: Path
    files: frozenset[str]


@dataclass(slots=True)
class Scalars:
    """Segments that serve the scalars of some files."""

    segments: list[Path] = field(default_factory=list)
    """Segments that together hold each row of the files once."""
    broken: dict[str, str] = field(default_factory=dict)
    """Unreadable files, which are left out, with the reason."""
    gone: list[str] = field(default_factory=list)
    """Files that vanished after they were listed."""


def segment_schema(root: Root) -> pa.Schema:
    """Return the columns of a segment: the run's scalars, then version, env and ADDRESS."""
    scalars = [column for column in rollouts_schema(root.extra_columns) if not pa.types.is_nested(column.type)]
    partition = [pa.field("version", pa.int64()), pa.field("env", pa.string())]
    address = [pa.field("file", pa.string()), pa.field("row_group", pa.int32()), pa.field("row", pa.int32())]
    return pa.schema([*scalars, *partition, *address])


def update_segments(root: Root, files: Sequence[RolloutFile], folder: Path) -> Scalars:
    """Return segments in `folder` with the scalars of exactly these files; reads files that no segment holds yet."""
    schema, left = segment_schema(root), {file.name: file for file in files}
    folder.mkdir(parents=True, exist_ok=True)
    stored = _read_segments(folder, schema)
    kept = _choose_segments(stored, left)
    for segment in kept:
        for name in segment.files:
            del left[name]
    scalars = Scalars([segment.path for segment in kept])
    for names, table in _fill_up(_scalar_rows(root, [s for s in stored if s not in kept], left, schema, scalars)):
        scalars.segments.append(_write_segment(folder, names, table))
    _forget_replaced(folder, set(scalars.segments))
    return scalars


def _read_segments(folder: Path, schema: pa.Schema) -> list[Segment]:
    """Read the segments of a folder, largest first, in the same order in each process."""
    segments = [_read_segment(path, schema) for path in folder.glob("*.parquet")]
    return sorted((s for s in segments if s is not None), key=lambda segment: (-len(segment.files), segment.path))


def _read_segment(path: Path, schema: pa.Schema) -> Segment | None:
    """Read a segment; returns None if it is damaged, foreign, or has another schema."""
    try:
        with pq.ParquetFile(path) as parquet:
            files = json.loads(parquet.metadata.metadata[_FILES_KEY])
            return Segment(path, frozenset(files)) if parquet.schema_arrow.equals(schema) else None
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError):
        return None


def _choose_segments(stored: Sequence[Segment], wanted: dict[str, RolloutFile]) -> list[Segment]:
    """Choose segments to use unchanged: all of their files are wanted, and no file is in two segments."""
    chosen: list[Segment] = []
    left = set(wanted)
    for segment in stored:
        if segment.files <= left:
            chosen.append(segment)
            left -= segment.files
    small = [segment for segment in chosen if len(segment.files) < SEGMENT_FILES // 2]
    kept = chosen if len(small) <= _MOST_SMALL_SEGMENTS else [s for s in chosen if s not in small]
    return [segment for segment in kept if _mark_in_use(segment.path)]


def _mark_in_use(path: Path) -> bool:
    """Update the modification time, which `_forget_replaced` reads; returns False if the segment is gone."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass  # the segment belongs to another user, who keeps it
    return True


def _scalar_rows(
    root: Root, segments: Sequence[Segment], left: dict[str, RolloutFile], schema: pa.Schema, scalars: Scalars
) -> Iterator[tuple[list[str], pa.Table]]:
    """Yield names of files with their rows: from segments that also hold other files, else from the files."""
    for segment in segments:
        names = [name for name in left if name in segment.files]
        table = _read_rows_of(segment, names) if names else None
        if table is not None:
            for name in names:
                del left[name]
            yield names, table
    if len(left) > _MANY_FILES:
        logger.info(
            "reading the scalars of %d new files of %s; the next connection finds them in the cache",
            len(left),
            root.url,
        )
    if len(left) > MANY_FILES:
        for small in read_small_files(root, list(left.values()), _own_columns(schema)):
            for file in small.files:
                del left[file.name]
            yield [file.name for file in small.files], _with_address(small, schema)
    files = list(left.values())
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1) if root.is_local else 32) as pool:
        for start in range(0, len(files), SEGMENT_FILES):
            some = files[start : start + SEGMENT_FILES]
            tables = list(pool.map(lambda file: _read_file(root, file, schema, scalars), some))
            found = [(file.name, table) for file, table in zip(some, tables, strict=True) if table is not None]
            if found:
                yield [name for name, _ in found], pa.concat_tables([table for _, table in found])


def _own_columns(schema: pa.Schema) -> list[str]:
    """Return the columns of a segment that a worker's file has."""
    return [name for name in schema.names if name not in ("version", "env", *ADDRESS)]


def _with_address(small: SmallFiles, schema: pa.Schema) -> pa.Table:
    """Add the partition and the address to the rows of files that have one row group each."""
    same = [small.column([value(file) for file in small.files]) for value in _SAME]
    row_groups = pa.array(np.zeros(small.table.num_rows, np.int32))
    columns = [*small.table.columns, *same, row_groups, pa.array(small.rows)]
    return pa.Table.from_arrays(columns, schema=schema)


def _read_rows_of(segment: Segment, names: Sequence[str]) -> pa.Table | None:
    """Read some files' rows from a segment; returns None if it is damaged or gone."""
    try:
        return pq.read_table(segment.path, filters=pc.field("file").isin(names))
    except (pa.ArrowException, OSError, ValueError):
        return None


def _read_file(root: Root, file: RolloutFile, schema: pa.Schema, scalars: Scalars) -> pa.Table | None:
    """Read all rows of a file; returns None, and notes it in `scalars`, if the file is broken or gone."""
    where = f"{root.url}/{file.name}"
    own = _own_columns(schema)
    try:
        with open_parquet(root, file.name) as parquet:
            counts = row_counts(parquet)
            table = read_row_groups(parquet, range(len(counts)), own, where, rollouts_schema(root.extra_columns))
    except FileNotFoundError:
        scalars.gone.append(file.name)
        return None
    except SchemaError as error:
        scalars.broken[file.name] = str(error)
        return None
    rows = np.concatenate([np.arange(count, dtype=np.int32) for count in [*counts, 0]])
    row_groups = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    same = [pa.repeat(pa.scalar(value(file)), table.num_rows) for value in _SAME]
    return pa.Table.from_arrays([*table.columns, *same, pa.array(row_groups), pa.array(rows)], schema=schema)


def _fill_up(pieces: Iterator[tuple[list[str], pa.Table]]) -> Iterator[tuple[list[str], pa.Table]]:
    """Join small pieces until they hold at least SEGMENT_FILES files."""
    names: list[str] = []
    tables: list[pa.Table] = []
    for some, table in pieces:
        names, tables = names + some, [*tables, table]
        if len(names) >= SEGMENT_FILES:
            yield names, pa.concat_tables(tables)
            names, tables = [], []
    if names:
        yield names, pa.concat_tables(tables)


def _write_segment(folder: Path, names: Sequence[str], table: pa.Table) -> Path:
    path, partial = folder / f"{uuid4()}.parquet", folder / f"{uuid4()}.partial"
    table = table.replace_schema_metadata({_FILES_KEY: json.dumps(names).encode()})
    pq.write_table(table, partial, compression="zstd", compression_level=1, row_group_size=_SEGMENT_ROW_GROUP)
    return partial.replace(path)


def _forget_replaced(folder: Path, in_use: set[Path]) -> None:
    """Delete replaced segments and leftovers of killed processes, once they are older than _IN_USE_S."""
    for path in folder.iterdir():
        try:
            if path not in in_use and time.time() - path.stat().st_mtime > _IN_USE_S:
                path.unlink()
        except OSError:
            continue  # another process deleted the file, or this user may not


# --- Lists: values read by address ---------------------------------------------------------------------
# Only scalars of workers' files are cached; lists, structs and maps are read when a query uses them.
#
# Each column is a DuckDB function of a row's address. DuckDB leaves out functions whose result is not used, and calls
# the others after filters, for some 2,000 rows at a time. Rows of a file that was compacted since are found in the
# compacted file. Raises SchemaError if a file is broken, StoreError if it is deleted or the filesystem fails.

ARGUMENTS = ("file", "row_group", "row", "rollout_id", "group_id")
"""Columns of a segment that locate a row's lists."""

_RECENT_BYTES = 256 << 20
_CONCURRENT_READS = 32


class ListReader:
    """Reads single columns of rows by address. DuckDB's threads share one reader."""

    def __init__(self, root: Root) -> None:
        self._root, self._schema = root, rollouts_schema(root.extra_columns)
        self._recent = _RecentFiles(root)
        # Local reads are too short for threads to help; remote reads wait for the network.
        self._pool = None if root.is_local else ThreadPoolExecutor(_CONCURRENT_READS)

    def read(
        self,
        column: str,
        file: pa.ChunkedArray,
        row_group: pa.ChunkedArray,
        row: pa.ChunkedArray,
        rollout_id: pa.ChunkedArray,
        group_id: pa.ChunkedArray,
    ) -> pa.ChunkedArray:
        """Return a column of some rows, in their order. The other arguments are ARGUMENTS, all of equal length."""
        rows = pa.table([file, row_group, row, rollout_id, group_id], names=ARGUMENTS)
        names = rows["file"].combine_chunks().dictionary_encode()
        key = _numbers(names.indices).astype(np.int64) << 32 | _numbers(rows["row_group"].combine_chunks())
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order])) + 1
        parts = [rows.take(_as_arrow(indexes)) for indexes in np.split(order, bounds)]
        found = (self._pool.map if self._pool else map)(lambda part: self._read_part(column, part), parts)
        values = pa.chunked_array([chunk for part in found for chunk in part.chunks], self._schema.field(column).type)
        return values if (order[1:] > order[:-1]).all() else values.take(_as_arrow(np.argsort(order)))

    def _read_part(self, column: str, rows: pa.Table) -> pa.ChunkedArray:
        """Return a column for rows of one row group."""
        name, row_group = rows["file"][0].as_py(), rows["row_group"][0].as_py()
        where = f"{self._root.url}/{name}"
        try:
            file, lock = self._recent.open(name)
            with lock:
                values = read_row_groups(file, [row_group], [column], where, self._schema)[column]
        except FileNotFoundError:
            return read_rollouts(self._root, rows, [column])[column]
        except LudicError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SchemaError(f"{where}: column {column} can't be read: {error}") from error
        indexes = _numbers(rows["row"].combine_chunks())
        whole = len(indexes) == len(values) and (indexes == np.arange(len(values))).all()
        return values if whole else values.take(rows["row"])


# pyarrow's own conversions to and from NumPy import pandas if it is installed, which takes a third of a second.


def _numbers(array: pa.Array) -> np.ndarray:
    return np.from_dlpack(array)


def _as_arrow(indexes: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(indexes), [None, pa.py_buffer(indexes.astype(np.int64))])


class _RecentFiles:
    """Keeps recent files open: a query often needs several columns of the same rows, and opening takes as long as
    reading."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._files: OrderedDict[str, tuple[pq.ParquetFile, threading.Lock, int]] = OrderedDict()
        self._num_bytes = 0

    def open(self, name: str) -> tuple[pq.ParquetFile, threading.Lock]:
        """Return a file, and a lock to read it with. Raises FileNotFoundError if there is no such file."""
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
                return self._files[name][:2]
        data = self._read(name)
        opened = pq.ParquetFile(data), threading.Lock(), data.size
        with self._lock:
            file, lock, size = self._files.setdefault(name, opened)
            self._num_bytes += size if file is opened[0] else 0
            while self._num_bytes > _RECENT_BYTES and len(self._files) > 1:
                self._num_bytes -= self._files.popitem(last=False)[1][2]
        return file, lock

    def _read(self, name: str) -> pa.Buffer:
        """Map a local file into memory; fetch a remote file whole, in one request."""
        if not self._root.is_local:
            return pa.py_buffer(self._root.read(name))
        with self._root.explained(name), pa.memory_map(self._root.file_for_others(name)) as file:
            return file.read_buffer()
