"""Merge files of one partition of rollouts or requests into a larger one, sorted by group_id, in bounded memory.

Row groups of the sources are read in the order of their smallest group_id, each once, with some read-ahead. As many as
fit into the buffer are sorted together, so where row groups of two buffers overlap, groups are slightly out of order,
which only makes pruning less effective. Groups stay whole.
Raises LostSourceError if a source is broken or gone, StoreError if the filesystem fails.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import SchemaError
from ludic.schema import arrow_schema, as_schema, rollouts_schema
from ludic.schema.tables import VERSION_KEY
from ludic.store.files import SOURCES_KEY, AppendedFile, sources_to_json
from ludic.store.parquet import (
    ROW_GROUP_BYTES,
    check_text,
    group_ranges,
    group_starts,
    open_parquet,
    open_writer,
    release_memory,
    row_group_bounds,
)
from ludic.store.root import Root

ROW_GROUP_ROWS = 1024
"""Maximum rows in a row group of a compacted file; ROW_GROUP_BYTES may end it earlier. More rows make scans little
faster and the read of one rollout slower (benchmarks/compaction.py)."""
REQUESTS_ROW_GROUP_ROWS = 1 << 16
"""Maximum rows in a row group of a compacted file of requests/, whose rows are small and are read all together."""

_MOST_BYTES = ROW_GROUP_BYTES
"""Memory for rows that are sorted together, and most bytes of a row group."""
_READ_AHEAD_BYTES = 32 << 20
_TABLE_BYTES = 1 << 14
"""Memory that a small table takes beside its values, so that thousands of tiny files stay within the bounds above."""
_SMALL_GROUP_BYTES = 1 << 12
"""Average bytes of a group below which a copy costs less than a slice for each group, as in requests/."""
_CONCURRENT_READS = 8
_INDEXED_AHEAD = 256


class LostSourceError(Exception):
    """A source can't be merged: holds its file and the reason (None if it is gone). The output is made without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIndex:
    """Schema, number of rows and row groups of a source, read before the merge."""

    file: AppendedFile
    schema: pa.Schema
    num_rows: int
    row_groups: tuple["_RowGroup", ...]


class _RowGroup(NamedTuple):
    """A row group of a source; row groups sort in the order in which they are read."""

    bound: str
    """Lower bound of its group_ids."""
    file: AppendedFile
    number: int
    size_bytes: int
    """Uncompressed size."""


def read_indexes(root: Root, files: Sequence[AppendedFile]) -> tuple[list[SourceIndex], list[LostSourceError]]:
    """Return the indexes of files that can be merged with each other, and errors for the others; reads only footers."""
    indexes: list[SourceIndex] = []
    lost: list[LostSourceError] = []
    schemas = list[pa.Schema]()
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        # Some at a time: a result that waits holds a schema of its own.
        batches = (files[start : start + _INDEXED_AHEAD] for start in range(0, len(files), _INDEXED_AHEAD))
        for index in chain.from_iterable(pool.map(partial(_try_index, root), batch) for batch in batches):
            if isinstance(index, SourceIndex):
                index = _share_schema(index, _own_schema(root, index.file), schemas)
            if isinstance(index, SourceIndex):
                indexes.append(index)
            else:
                lost.append(index)
    return indexes, lost


def _try_index(root: Root, file: AppendedFile) -> "SourceIndex | LostSourceError":
    try:
        return _read_index(root, file)
    except LostSourceError as error:
        return error


def _read_index(root: Root, file: AppendedFile) -> SourceIndex:
    with _lost(file), open_parquet(root, file.name, file.table) as parquet:
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


def _share_schema(index: SourceIndex, own: pa.Schema, schemas: list[pa.Schema]) -> "SourceIndex | LostSourceError":
    """Return the index with an equal schema from `schemas`, to which a new schema is added if it fits the others.

    A schema takes about 50 kB, and thousands of files have the same schema.
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


def _own_schema(root: Root, file: AppendedFile) -> pa.Schema:
    return rollouts_schema(root.run.extra_columns) if file.table == "rollouts" else arrow_schema(file.table)


@contextmanager
def _lost(file: AppendedFile) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise LostSourceError(file, None) from error
    except SchemaError as error:
        raise LostSourceError(file, str(error)) from error


def common_schema(own: pa.Schema, schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Return the run's own schema, then columns that only these files have, with the newest minor version of all.

    Raises pa.ArrowTypeError if two schemas differ in the type of a column.
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
    """Write all rows of the sources into a local file whose footer names them; replaces the file if it exists."""
    schema = common_schema(_own_schema(root, sources[0].file), (source.schema for source in sources))
    is_rollouts = sources[0].file.table == "rollouts"
    max_rows = ROW_GROUP_ROWS if is_rollouts else REQUESTS_ROW_GROUP_ROWS
    names = sources_to_json(source.file.source for source in sources)
    row_groups = sorted(row_group for source in sources for row_group in source.row_groups)
    num_rows = 0
    with (
        ThreadPoolExecutor(_CONCURRENT_READS) as pool,
        open_writer(target, schema, {SOURCES_KEY: names}, is_plain=not is_rollouts) as writer,
    ):
        for rows in _sorted_by_group(_read_ahead(pool, root, row_groups, schema)):
            num_rows, size_bytes = num_rows + rows.num_rows, rows.nbytes
            release_memory(size_bytes)  # before as well: encoding takes the most memory
            for start, stop in row_group_bounds(rows, max_rows=max_rows, max_bytes=_MOST_BYTES):
                writer.write_table(rows.slice(start, stop - start), row_group_size=stop - start)
            del rows
            release_memory(size_bytes)
    assert num_rows == sum(source.num_rows for source in sources), "rows were lost or doubled while they were merged"


def _read_ahead(
    pool: ThreadPoolExecutor, root: Root, row_groups: Iterable[_RowGroup], schema: pa.Schema
) -> Iterator[pa.Table]:
    """Yield the tables of row groups in order, reading some ahead."""
    reading: deque[tuple[int, Future[pa.Table]]] = deque()
    ahead_bytes = 0
    for row_group in row_groups:
        size_bytes = row_group.size_bytes + _TABLE_BYTES
        while reading and ahead_bytes + size_bytes > _READ_AHEAD_BYTES:
            ahead_bytes -= reading[0][0]
            yield reading.popleft()[1].result()
        reading.append((size_bytes, pool.submit(_read, root, row_group, schema)))
        ahead_bytes += size_bytes
    while reading:
        yield reading.popleft()[1].result()


def _read(root: Root, row_group: _RowGroup, schema: pa.Schema) -> pa.Table:
    """Return the rows of a row group; null where it lacks a column of `schema`."""
    file = row_group.file
    with _lost(file), open_parquet(root, file.name, file.table) as parquet:
        table = parquet.read_row_group(row_group.number, use_threads=False)
        check_text(table, file.name)
        mine = pc.equal(table["worker_id"], file.worker_id)
        if file.table == "rollouts":
            mine = pc.and_(mine, pc.equal(table["sequence"], file.sequence))
        if not pc.all(mine).as_py():
            raise SchemaError("it holds rows of another worker or sequence; somebody copied it")
        return as_schema(table, schema, file.name)


def _sorted_by_group(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join tables up to _MOST_BYTES, a larger one alone, and sort the groups of each joined table by group_id."""
    taken: list[pa.Table] = []
    num_bytes = 0
    for table in tables:
        size_bytes = table.nbytes + _TABLE_BYTES
        if taken and num_bytes + size_bytes > _MOST_BYTES:
            yield _sort_groups(pa.concat_tables(taken))
            taken, num_bytes = [], 0
        taken.append(table)
        num_bytes += size_bytes
        del table  # else it stays in memory while the rows are written
    yield _sort_groups(pa.concat_tables(taken))


def _sort_groups(rows: pa.Table) -> pa.Table:
    """Return the rows sorted by group_id, without a copy if groups are large."""
    starts = group_starts(rows)
    if rows.nbytes < _SMALL_GROUP_BYTES * len(starts):
        return rows.take(pc.sort_indices(rows["group_id"]))
    order = np.argsort(rows["group_id"].take(pa.array(starts)).to_numpy(), kind="stable")
    stops = np.append(starts[1:], rows.num_rows)
    return pa.concat_tables([rows.slice(starts[group], stops[group] - starts[group]) for group in order])
