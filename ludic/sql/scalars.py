"""Cache the scalars of workers' files on this machine: a file never changes, so it is read once.

Writes "segments", {folder}/{uuid4}.parquet: the scalar columns, the partition (version, env) and the address (file,
row_group, row) of all rows of the files that the footer names. A segment appears complete and never changes, and its
data can be read again. So several processes may share a folder without a lock, and damaged or foreign segments are
ignored. Raises OSError if the folder can't be written, StoreError if the root can't be read.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ludic.errors import SchemaError
from ludic.schema import rollouts_schema
from ludic.store import RolloutFile, Root
from ludic.store.parquet import open_parquet, read_row_groups, row_counts
from ludic.store.reader import MANY_FILES, SmallFiles, read_small_files

logger = logging.getLogger(__name__)

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
    scalars = [column for column in rollouts_schema(root.run.extra_columns) if not pa.types.is_nested(column.type)]
    partition = [pa.field("version", pa.int64()), pa.field("env", pa.string())]
    address = [pa.field("file", pa.string()), pa.field("row_group", pa.int32()), pa.field("row", pa.int32())]
    return pa.schema([*scalars, *partition, *address])


def update(root: Root, files: Sequence[RolloutFile], folder: Path) -> Scalars:
    """Return segments in `folder` with the scalars of exactly these files; reads files that no segment holds yet."""
    schema, left = segment_schema(root), {file.name: file for file in files}
    folder.mkdir(parents=True, exist_ok=True)
    stored = _read_segments(folder, schema)
    kept = _choose(stored, left)
    for segment in kept:
        for name in segment.files:
            del left[name]
    scalars = Scalars([segment.path for segment in kept])
    for names, table in _fill_up(_rows(root, [s for s in stored if s not in kept], left, schema, scalars)):
        scalars.segments.append(_write(folder, names, table))
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


def _choose(stored: Sequence[Segment], wanted: dict[str, RolloutFile]) -> list[Segment]:
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


def _rows(
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
        logger.info("reading the scalars of %d new files of %s; the next time they are here", len(left), root.url)
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
            table = read_row_groups(parquet, range(len(counts)), own, where, rollouts_schema(root.run.extra_columns))
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


def _write(folder: Path, names: Sequence[str], table: pa.Table) -> Path:
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
            continue  # another process deleted the file, or we may not delete it
