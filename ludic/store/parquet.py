"""Parquet files of rollouts, read: opened and checked, by row groups, rows or columns; encoding.py makes them."""

import io
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import LudicError, SchemaError, StoreError, in_a_line
from ludic.schema import arrow_schema, check_schema, rollouts_schema
from ludic.store.root import Root

_UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises for a broken file; the last, for example, for names in a damaged footer."""
_sound: tuple[dict[bytes, bytes], pq.ParquetSchema] | None = None
"""Footer entries and schema of a file that check_schema found sound."""
_footers: OrderedDict[bytes, pq.FileMetaData] = OrderedDict()
"""By their bytes, those of files that were opened last: what was polled is soon read again, and parsing takes long."""
_MOST_FOOTERS, _LARGEST_FOOTER = 128, 1 << 16
_FOOTER_END = 8
"""Bytes after a footer: its length, and PAR1."""


@contextmanager
def open_parquet(root: Root, name: str) -> Iterator[pq.ParquetFile]:
    """A rollouts file whose schema is checked; what fails while it is read is explained.

    Raises SchemaError for a broken or a foreign file, FileNotFoundError for none, StoreError
    when the filesystem fails: those two may pass, a broken file never mends.
    """
    with root.explained(name), root.open_file(name) as source:
        try:
            footer = _footer_bytes(source)
            parsed = _footers.get(footer)
            # From a disk, column by column is quicker than through Arrow's threads; a request to a server is not.
            with pq.ParquetFile(source, metadata=parsed, pre_buffer=not root.is_local) as file:
                if parsed is None:
                    _check_schema(file, f"{root.url}/{name}")
                    _keep_footer(footer, file.metadata)
                yield file
        except (LudicError, FileNotFoundError):
            raise
        except _UNREADABLE as error:
            raise _why_unreadable(root, name, error) from error


def _footer_bytes(source: BinaryIO) -> bytes:
    """With its end; empty for a large one, or where there is none."""
    end = source.seek(0, io.SEEK_END) - _FOOTER_END
    source.seek(max(0, end))
    start = end - int.from_bytes(source.read(4), "little")
    if not 0 < end - start <= min(end, _LARGEST_FOOTER):
        return b""
    source.seek(start)
    return source.read()


def _keep_footer(footer: bytes, parsed: pq.FileMetaData) -> None:
    if footer:
        _footers[footer] = parsed
    if len(_footers) > _MOST_FOOTERS:
        with suppress(KeyError):  # another thread may be quicker
            _footers.popitem(last=False)


def _check_schema(file: pq.ParquetFile, where: str) -> None:
    """As check_schema; a file like the one before is known to be sound, and Arrow schemas are slow to make and hash."""
    global _sound
    found = file.metadata.metadata or {}, file.schema
    if not (_sound and _sound[0] == found[0] and _sound[1].equals(found[1])):
        check_schema(file.schema_arrow, "rollouts", where)
        _sound = found


def _why_unreadable(root: Root, name: str, error: Exception) -> LudicError:
    """A broken file and a broken network raise alike in pyarrow: reading all of it from memory tells them apart."""
    data = root.read(name)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        for row_group in range(file.num_row_groups):
            file.read_row_group(row_group)
    except _UNREADABLE:
        return SchemaError(
            f"{root.url}/{name}: no Parquet file, or a broken one, of {len(data)} bytes ({in_a_line(error)}); "
            f"it is set aside; `ludic verify {root.url}` lists all such files"
        )
    return StoreError(f"{root.url}/{name}: {type(error).__name__}: {in_a_line(error)}")


def read_rows(root: Root, name: str, addresses: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
    """Columns of single rows, in the order of their addresses (row group, row in it); reads those row groups only.

    Files of an older schema give nulls for what they lack.
    """
    row_groups = sorted({row_group for row_group, _ in addresses})
    schema = rollouts_schema(root.run.extra_columns)
    with open_parquet(root, name) as file:
        starts = np.cumsum([0, *(file.metadata.row_group(row_group).num_rows for row_group in row_groups[:-1])])
        table = read_row_groups(file, row_groups, columns, f"{root.url}/{name}", schema)
    start_of = dict(zip(row_groups, starts.tolist(), strict=False))
    return take_rows(table, [start_of[row_group] + row for row_group, row in addresses])


def take_rows(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    """These rows; without a copy where they lie together, as those of a batch's groups do."""
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return table.slice(rows[0], len(rows))
    return table.take(rows)


def read_columns(root: Root, name: str, columns: Sequence[str]) -> pa.Table:
    """Columns of a whole file; nulls for what a file of an older schema lacks."""
    schema = rollouts_schema(root.run.extra_columns)
    with open_parquet(root, name) as file:
        return read_row_groups(file, range(file.num_row_groups), columns, f"{root.url}/{name}", schema)


def row_counts(file: pq.ParquetFile) -> np.ndarray:
    """(num_row_groups,) int64: rows of each row group."""
    metadata = file.metadata
    return np.array([metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)], dtype=np.int64)


def read_row_groups(
    file: pq.ParquetFile,
    row_groups: Iterable[int],
    columns: Sequence[str],
    where: str,
    schema: pa.Schema | None = None,
) -> pa.Table:
    """Columns in the order asked for, and in exactly the types of the schema, whoever wrote the file.

    schema: of the run, where it has columns of its own (rollouts_schema); else that of the rollouts table.
    Nulls for what a file of an older schema lacks. Raises SchemaError, naming `where`, for a null that is not allowed.
    """
    table = _read(file, list(row_groups), list(columns))
    wanted = pa.schema([(schema or arrow_schema("rollouts")).field(column) for column in columns])
    found = dict(zip(table.column_names, table.columns, strict=True))
    return pa.Table.from_arrays(
        [_fit(found.get(field.name), field, table.num_rows, where) for field in wanted], schema=wanted
    )


def _read(file: pq.ParquetFile, row_groups: list[int], columns: list[str]) -> pa.Table:
    """Names that the file lacks are passed over."""
    try:
        return file.read_row_groups(row_groups, columns=columns, use_threads=False)
    except pa.ArrowNotImplementedError:
        # More than 2 GiB of nested text, which pyarrow can't hand out as one array.
        if len(row_groups) == 1:
            raise
    return pa.concat_tables([_read(file, [row_group], columns) for row_group in row_groups])


def _fit(column: pa.ChunkedArray | None, field: pa.Field, num_rows: int, where: str) -> pa.ChunkedArray:
    if column is not None and column.null_count and not field.nullable:
        raise SchemaError(f"{where}: column {field.name!r} has {column.null_count} nulls, wanted none")
    return as_type(column, field.type, num_rows)


def as_type(column: pa.ChunkedArray | None, type_: pa.DataType, num_rows: int) -> pa.ChunkedArray:
    """A column in exactly this type; nulls for one that a file lacks."""
    if column is None:
        return pa.chunked_array([pa.nulls(num_rows, type_)])
    return column if column.type == type_ else column.cast(type_)
