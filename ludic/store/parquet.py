"""Open and check Parquet files; read those of rollouts by row groups, rows or columns; encoding.py writes them."""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import LudicError, SchemaError, StoreError, one_line
from ludic.schema import arrow_schema, as_schema, check_schema, rollouts_schema
from ludic.store.digests import CheckedFile, Digests, parse_end, read_end
from ludic.store.root import Root

UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""Errors that pyarrow raises for a broken file; ValueError, for example, for names in a damaged footer."""
_sound: tuple[str, dict[bytes, bytes], pq.ParquetSchema] | None = None
"""Table, footer entries and schema of the last file that check_schema found sound."""
Parse = Callable[[BinaryIO, bytes, str], tuple[pq.FileMetaData, Digests | None]]
"""Parses the end of a Parquet file into metadata and digests, for example parse_end."""
_ends: OrderedDict[bytes, tuple[pq.FileMetaData, Digests | None]] = OrderedDict()
"""Parsed ends of recently opened files, by their bytes: a polled file is soon read again, and parsing is slow."""
_MOST_ENDS, _LARGEST_END = 128, 1 << 16
_SMALL_BYTES = 1 << 21
"""A file up to this size is read and checked at once, so that Arrow reads memory and calls no Python per column."""
_TEXTS, _DICTIONARY = {pa.string().id, pa.large_string().id}, pa.dictionary(pa.int8(), pa.string()).id


@contextmanager
def open_parquet(root: Root, name: str, table: str = "rollouts", *, whole: bool = False) -> Iterator[pq.ParquetFile]:
    """Open a file of a table and check its schema; its bytes are checked as they are read, and errors name the file.

    whole: check all bytes at once, also those that are not read.

    Raises SchemaError if the file is broken or foreign, FileNotFoundError if there is none, and StoreError if the
    filesystem fails. Only the last two may succeed on another try.
    """
    where = f"{root.url}/{name}"
    with root.explained(name), root.open_file(name) as source:
        try:
            # On a disk, reading column by column is faster than Arrow's threads; on a server it is slower.
            ahead = not root.is_local
            with open_checked(source, where, pre_buffer=ahead, parse=_parse_known) as (file, checked):
                _check_schema(file, table, where)
                if whole and checked is not None:
                    checked.check_rest()
                yield file
        except (LudicError, FileNotFoundError):
            raise
        except UNREADABLE as error:
            if is_broken(root, name):
                raise SchemaError(
                    f"{where}: no Parquet file, or a broken one, of {source.seek(0, io.SEEK_END)} bytes "
                    f"({one_line(error)}); "
                    f"it is quarantined; `ludic verify {root.url}` lists all such files"
                ) from error
            raise StoreError(f"{where}: {type(error).__name__}: {one_line(error)}") from error


@contextmanager
def open_checked(
    source: BinaryIO, where: str, *, pre_buffer: bool = False, parse: Parse = parse_end
) -> Iterator[tuple[pq.ParquetFile, CheckedFile | None]]:
    """Open a Parquet file of any table, with the CheckedFile that checks its bytes as they are read.

    The CheckedFile is None if the file has no digests. Raises SchemaError, naming `where`, if bytes do not match their
    digest, and pyarrow's errors for other damage.
    """
    end = read_end(source)
    metadata, digests = parse(source, end, where) if end else (None, None)
    checked = CheckedFile(source, digests, where) if digests else None
    is_small = checked is not None and checked.size <= _SMALL_BYTES
    data = pa.BufferReader(checked.read_buffer(checked.size)) if checked and is_small else checked or source
    with pq.ParquetFile(data, metadata=metadata, pre_buffer=pre_buffer) as file:
        yield file, checked


def _parse_known(source: BinaryIO, end: bytes, where: str) -> tuple[pq.FileMetaData, Digests | None]:
    """Parse the end of a file with parse_end, unless an equal end was parsed recently.

    In that case this file's block of page digests is not read, and damage to the block is not noticed.
    """
    found = _ends.get(end) or parse_end(source, end, where)
    if len(end) <= _LARGEST_END:
        _ends[end] = found
    if len(_ends) > _MOST_ENDS:
        with suppress(KeyError):  # another thread may be faster
            _ends.popitem(last=False)
    return found


def decode(data: bytes, where: str) -> pa.Table:
    """Return all rows of a small file of any table. Raises SchemaError, naming `where`, if the file is broken."""
    try:
        with open_checked(io.BytesIO(data), where) as (file, checked):
            table = file.read(use_threads=False)
            if checked:
                checked.check_rest()
    except SchemaError:
        raise
    except UNREADABLE as error:
        raise SchemaError(
            f"{where}: no Parquet file, or a broken one, of {len(data)} bytes ({one_line(error)})"
        ) from error
    check_text(table, where)
    return table


def check_text(rows: pa.Table | pa.RecordBatch, where: str) -> None:
    """Raises SchemaError if the text of a column is not UTF-8, which Arrow itself does not check."""
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        if not _holds_text(column.type):
            continue
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            what = "text that is no UTF-8" if "UTF8" in str(error) else f"a broken {column.type}"
            raise SchemaError(f"{where}: column {name!r} holds {what} ({one_line(error)})") from error


def _holds_text(type_: pa.DataType) -> bool:
    """Return whether a type holds text at any depth. Not cached: hashing an Arrow type takes longer."""
    if type_.id == _DICTIONARY:
        return _holds_text(type_.value_type)
    return type_.id in _TEXTS or any(_holds_text(type_.field(index).type) for index in range(type_.num_fields))


def _check_schema(file: pq.ParquetFile, table: str, where: str) -> None:
    """Call check_schema, unless the file is like the last sound file: Arrow schemas are slow to make and hash."""
    global _sound
    found = table, file.metadata.metadata or {}, file.schema
    if not (_sound and _sound[:2] == found[:2] and _sound[2].equals(found[2])):
        check_schema(file.schema_arrow, table, where)
        _sound = found


def is_broken(root: Root, name: str) -> bool:
    """Return whether an unreadable file is broken, or only the network failed; pyarrow raises the same for both."""
    data = root.read(name)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        for row_group in range(file.num_row_groups):
            file.read_row_group(row_group)
    except UNREADABLE:
        return True
    return False


def read_rows(root: Root, name: str, addresses: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
    """Return columns of single rows, in the order of `addresses`; reads only the row groups that they name.

    addresses: row group, and index of the row in it. Columns that a file of an older schema lacks are null.
    """
    row_groups = sorted({row_group for row_group, _ in addresses})
    schema = rollouts_schema(root.run.extra_columns)
    with open_parquet(root, name) as file:
        starts = np.cumsum([0, *(file.metadata.row_group(row_group).num_rows for row_group in row_groups[:-1])])
        table = read_row_groups(file, row_groups, columns, f"{root.url}/{name}", schema)
    start_of = dict(zip(row_groups, starts.tolist(), strict=False))
    return take_rows(table, [start_of[row_group] + row for row_group, row in addresses])


def take_rows(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    """Return these rows, without a copy if they are contiguous, as the rows of a batch's groups are."""
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return table.slice(rows[0], len(rows))
    return table.take(rows)


def read_columns(root: Root, name: str, columns: Sequence[str]) -> pa.Table:
    """Return columns of a whole file; columns that a file of an older schema lacks are null."""
    schema = rollouts_schema(root.run.extra_columns)
    with open_parquet(root, name) as file:
        return read_row_groups(file, range(file.num_row_groups), columns, f"{root.url}/{name}", schema)


def group_ranges(file: pq.ParquetFile, column: str = "group_id") -> list[tuple[str, str | None]]:
    """Return bounds of the group_ids of each row group, from footer statistics; ("", None) if there are none.

    column: another column of ids to look at.
    """
    # The ids are the first columns, and looking at all 48 takes as long as reading the footer.
    index = next(index for index in range(len(file.schema)) if file.schema.column(index).path == column)
    chunks = (file.metadata.row_group(number).column(index) for number in range(file.num_row_groups))
    statistics = (chunk.statistics for chunk in chunks)
    return [(s.min, s.max) if s is not None and s.has_min_max else ("", None) for s in statistics]


def row_counts(file: pq.ParquetFile) -> np.ndarray:
    """Return the number of rows of each row group: (num_row_groups,) int64."""
    metadata = file.metadata
    return np.array([metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)], dtype=np.int64)


def read_row_groups(
    file: pq.ParquetFile,
    row_groups: Iterable[int],
    columns: Sequence[str],
    where: str,
    schema: pa.Schema | None = None,
) -> pa.Table:
    """Return columns in the requested order, in exactly the types of the schema, whichever program wrote the file.

    schema: the run's schema if it has extra columns (rollouts_schema); None means that of the rollouts table.
    Columns that a file of an older schema lacks are null. Raises SchemaError, naming `where`, for a forbidden null.
    """
    table = _read(file, list(row_groups), list(columns))
    check_text(table, where)
    wanted = pa.schema([(schema or arrow_schema("rollouts")).field(column) for column in columns])
    return as_schema(table, wanted, where)


def _read(file: pq.ParquetFile, row_groups: list[int], columns: list[str]) -> pa.Table:
    """Return columns of row groups, without the columns that the file lacks."""
    try:
        return file.read_row_groups(row_groups, columns=columns, use_threads=False)
    except pa.ArrowNotImplementedError:
        # More than 2 GiB of nested text, which pyarrow can't return as one array.
        if len(row_groups) == 1:
            raise
    return pa.concat_tables([_read(file, [row_group], columns) for row_group in row_groups])
