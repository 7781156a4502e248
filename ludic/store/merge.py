"""Merge rollout files of one partition into a larger one, sorted by group_id, in bounded memory.

Row groups of the sources are read in the order of their smallest group_id, each once and some ahead, and a group
is written as soon as none that is yet to be read can come before it. Where more overlap in time than fit into the
buffer, groups are written somewhat out of order, which costs pruning and nothing else. Groups stay whole.
Raises LostSourceError for a source that is broken or gone, StoreError when the filesystem fails.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ludic.errors import SchemaError
from ludic.schema import rollouts_schema
from ludic.schema.tables import VERSION_KEY
from ludic.store.encoding import ROW_GROUP_BYTES, group_starts, open_writer, release_memory
from ludic.store.files import RolloutFile
from ludic.store.parquet import as_type, check_text, open_parquet
from ludic.store.root import Root
from ludic.store.sources import SOURCES_KEY, to_json

ROW_GROUP_ROWS = 1024
"""Rows that share a row group of a compacted file, unless ROW_GROUP_BYTES are reached before: more make scans little
faster and the read of one rollout slower (benchmarks/compaction.py)."""

_BUFFER_BYTES = 96 << 20
"""Groups that wait for their turn."""
_READ_AHEAD_BYTES = 32 << 20
_CONCURRENT_READS = 8
_COPY_ABOVE_BYTES = 2 << 20
"""A group that is cut from a row group keeps all of it in memory; from a larger one it is copied."""


class LostSourceError(Exception):
    """A source can't be merged: its file, and why, or None for a file that is gone. The output is made without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIndex:
    """What is to be known of a source before it is merged."""

    file: RolloutFile
    schema: pa.Schema
    num_rows: int
    row_groups: tuple["_RowGroup", ...]


class _RowGroup(NamedTuple):
    """Row groups sort as they are read."""

    bound: str
    """No group_id in it comes before."""
    file: RolloutFile
    number: int
    size_bytes: int
    """Uncompressed."""


def read_indexes(root: Root, files: Iterable[RolloutFile]) -> tuple[list[SourceIndex], list[LostSourceError]]:
    """Of files that can be merged with each other, by their footers alone; and why not the others."""
    indexes: list[SourceIndex] = []
    lost: list[LostSourceError] = []
    own, schemas = rollouts_schema(root.run.extra_columns), list[pa.Schema]()
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for index in pool.map(partial(_try_index, root), files):
            if isinstance(index, SourceIndex):
                index = _share_schema(index, own, schemas)
            if isinstance(index, SourceIndex):
                indexes.append(index)
            else:
                lost.append(index)
    return indexes, lost


def _try_index(root: Root, file: RolloutFile) -> "SourceIndex | LostSourceError":
    try:
        return _read_index(root, file)
    except LostSourceError as error:
        return error


def _read_index(root: Root, file: RolloutFile) -> SourceIndex:
    with _lost(file), open_parquet(root, file.name) as parquet:
        metadata = parquet.metadata
        if metadata.num_rows == 0:
            raise SchemaError("it holds no rows; no worker writes such a file")
        return SourceIndex(
            file=file,
            schema=parquet.schema_arrow,
            num_rows=metadata.num_rows,
            row_groups=tuple(
                _RowGroup(lowest, file, number, metadata.row_group(number).total_byte_size)
                for number, (lowest, _) in enumerate(group_ranges(parquet))
            ),
        )


def group_ranges(parquet: pq.ParquetFile) -> list[tuple[str, str | None]]:
    """Of each row group, bounds of its group_ids by the footer's statistics; ("", None) where they say nothing."""
    column = [parquet.schema.column(place).path for place in range(len(parquet.schema))].index("group_id")
    chunks = (parquet.metadata.row_group(number).column(column) for number in range(parquet.num_row_groups))
    statistics = (chunk.statistics for chunk in chunks)
    return [(s.min, s.max) if s is not None and s.has_min_max else ("", None) for s in statistics]


def _share_schema(index: SourceIndex, own: pa.Schema, schemas: list[pa.Schema]) -> "SourceIndex | LostSourceError":
    """The index with a schema of `schemas`, where a new one is added if it goes with the others.

    A schema takes some 50 kB, and thousands of files have the same.
    """
    for schema in schemas:
        if schema.equals(index.schema, check_metadata=True):
            return replace(index, schema=schema)
    try:
        common_schema(own, [*schemas, index.schema])
    except pa.ArrowException as error:
        return LostSourceError(index.file, f"its columns do not go with those of other files: {error}")
    schemas.append(index.schema)
    return index


@contextmanager
def _lost(file: RolloutFile) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise LostSourceError(file, None) from error
    except SchemaError as error:
        raise LostSourceError(file, str(error)) from error


def common_schema(own: pa.Schema, schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The run's own schema, with columns that only these files have behind it, and the newest minor version of all.

    Raises pa.ArrowTypeError where two of them differ in the type of a column.
    """
    merged, versions = own, [_minor(own)]
    for schema in schemas:
        merged = pa.unify_schemas([merged, schema])
        versions.append(_minor(schema))
    fields = [field if field.name in own.names else field.with_nullable(True) for field in merged]
    version = ".".join(map(str, max(versions)))
    return pa.schema(fields, metadata={**(own.metadata or {}), VERSION_KEY: version.encode()})


def _minor(schema: pa.Schema) -> tuple[int, ...]:
    return tuple(int(part) for part in schema.metadata[VERSION_KEY].split(b"."))


def write_merged(root: Root, sources: Sequence[SourceIndex], target: Path) -> None:
    """Write all rows of the sources into a local file whose footer names them; what is there is replaced."""
    schema = common_schema(rollouts_schema(root.run.extra_columns), (source.schema for source in sources))
    names = to_json(source.file.source for source in sources)
    row_groups = sorted(row_group for source in sources for row_group in source.row_groups)
    num_rows = 0
    with (
        ThreadPoolExecutor(_CONCURRENT_READS) as pool,
        open_writer(target, schema, {SOURCES_KEY: names}) as writer,
    ):
        tables = _read_ahead(pool, root, row_groups, schema)
        for table in _fill_row_groups(_in_order(row_groups, tables)):
            num_rows, size_bytes = num_rows + table.num_rows, table.nbytes
            release_memory(size_bytes)  # before as well: encoding is what takes most
            writer.write_table(table, row_group_size=table.num_rows)
            del table
            release_memory(size_bytes)
    assert num_rows == sum(source.num_rows for source in sources), "rows were lost or doubled while they were merged"


def _read_ahead(
    pool: ThreadPoolExecutor, root: Root, row_groups: Iterable[_RowGroup], schema: pa.Schema
) -> Iterator[pa.Table]:
    """The tables of row groups, some of them read before they are asked for."""
    reading: deque[tuple[int, Future[pa.Table]]] = deque()
    for row_group in row_groups:
        while reading and sum(size for size, _ in reading) + row_group.size_bytes > _READ_AHEAD_BYTES:
            yield reading.popleft()[1].result()
        reading.append((row_group.size_bytes, pool.submit(_read, root, row_group, schema)))
    while reading:
        yield reading.popleft()[1].result()


def _read(root: Root, row_group: _RowGroup, schema: pa.Schema) -> pa.Table:
    """Its rows, nulls where it lacks a column of `schema`."""
    with _lost(row_group.file), open_parquet(root, row_group.file.name) as parquet:
        table = parquet.read_row_group(row_group.number, use_threads=False)
        check_text(table, row_group.file.name)
        source = row_group.file.source
        mine = pc.and_(pc.equal(table["worker_id"], source.worker_id), pc.equal(table["sequence"], source.sequence))
        if not pc.all(mine).as_py():
            raise SchemaError("it holds rows of another worker or sequence; somebody copied it")
        found = dict(zip(table.column_names, table.columns, strict=True))
        return pa.Table.from_arrays(
            [as_type(found.get(field.name), field.type, table.num_rows) for field in schema], schema=schema
        )


class _Group(NamedTuple):
    """Groups sort by their ids; those of equal ids in the order of reading."""

    group_id: str
    place: int
    size_bytes: int
    """In memory: its share, by rows, of what was read with it. To measure it takes 0.1 ms."""
    rows: pa.Table


def _in_order(row_groups: Sequence[_RowGroup], tables: Iterator[pa.Table]) -> Iterator[_Group]:
    """Groups by group_id; tables: of the row groups, in their order."""
    waiting: list[_Group] = []
    places = itertools.count()
    held_bytes = 0
    for next_bound in [*(row_group.bound for row_group in row_groups[1:]), None]:
        for group in _split(next(tables), places):
            heapq.heappush(waiting, group)
            held_bytes += group.size_bytes
        del group
        while waiting and (next_bound is None or waiting[0].group_id < next_bound or held_bytes > _BUFFER_BYTES):
            held_bytes -= waiting[0].size_bytes
            yield heapq.heappop(waiting)


def _split(table: pa.Table, places: Iterator[int]) -> Iterator[_Group]:
    """The groups of a row group."""
    starts, size_bytes = group_starts(table).tolist(), table.nbytes
    are_copied = len(starts) > 1 and size_bytes > _COPY_ABOVE_BYTES
    for start, stop in itertools.pairwise([*starts, table.num_rows]):
        rows = table.slice(start, stop - start)
        if are_copied:
            rows = rows.take(pa.array(range(rows.num_rows)))
        yield _Group(table["group_id"][start].as_py(), next(places), size_bytes * len(rows) // len(table), rows)


def _fill_row_groups(groups: Iterable[_Group]) -> Iterator[pa.Table]:
    """Row groups to write; each group whole, as its source has it."""
    taken: list[pa.Table] = []
    num_rows = num_bytes = 0
    for _, _, size_bytes, rows in groups:
        if taken and (num_rows + len(rows) > ROW_GROUP_ROWS or num_bytes + size_bytes > ROW_GROUP_BYTES):
            yield _concatenated(taken)
            num_rows = num_bytes = 0
        taken.append(rows)
        num_rows, num_bytes = num_rows + len(rows), num_bytes + size_bytes
        del rows  # it would be held while more is read, and so would a row group that is full
        if num_bytes >= ROW_GROUP_BYTES:
            yield _concatenated(taken)
            num_rows = num_bytes = 0
    if taken:
        yield _concatenated(taken)


def _concatenated(taken: list[pa.Table]) -> pa.Table:
    """What was taken, which is then let go."""
    table = pa.concat_tables(taken)
    taken.clear()
    return table
