"""Write and read Parquet files, with digests of their bytes that every read checks.

Every file that ludic writes holds digests, and a read checks the bytes that it uses. Rollouts are read by row groups,
rows or columns; other tables whole. Raises SchemaError if a file is broken or foreign, or if its rows would take far
more memory than those of ludic's own files; StoreError if the filesystem fails.
"""

import functools
import io
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_64_intdigest

from ludic.errors import LudicError, SchemaError, StoreError, one_line
from ludic.records import (
    ArrayColumn,
    array_columns,
    arrow_schema,
    as_schema,
    check_schema,
    load_table,
    rollouts_schema,
)
from ludic.root.catalogue import FILE_KINDS, Table
from ludic.root.root import Root
from ludic.root.storage.filesystem import MemoryFile

# --- Digests --------------------------------------------------------------------------------------------------
# Digests of all bytes of a Parquet file, stored inside the file, so that a read can check the bytes it takes.
#
#     PAR1, column chunks | a digest of each page of 64 KiB before | trailer | footer, its length, PAR1
#
# Parquet readers locate the footer from the end of the file and all else by offsets from its start, so other readers
# ignore the block in between. The trailer holds the digest of the footer and that of the block itself. The footer's
# entry `ludic.digests` marks the block's presence, so damage to the footer or the block is detected through the other.
# A file without both, from an older ludic or another writer, is read unchecked. Digests are 64-bit XXH3: they detect
# accidents, not forgery. Only `seal_file` opens a file.


DIGESTS_KEY = b"ludic.digests"
"""Key of the footer entry that marks a file with digests."""
PAGE_BYTES = 1 << 16
"""Size of a page, in bytes. A read takes whole pages; smaller ones cost more calls. Digests take 0.01% of a file."""
_MAGIC = b"LUDICxx1"
_TRAILER = struct.Struct("<QQ8sQ")
"""Number of bytes that have page digests, digest of footer to end, _MAGIC, digest of the block up to here."""
_FOOTER_END = 8
"""Number of bytes after a footer: its length (4), and PAR1."""


def seal(data: Any) -> bytes:
    """Return a Parquet file with its digests added. data: a buffer of the whole file, whose footer has DIGESTS_KEY."""
    view = memoryview(data).cast("B")
    start = _footer_start(view)
    return b"".join([view[:start], _block(view[:start], view[start:]), view[start:]])


def sound_footer(data: bytes) -> bytes | None:
    """Return the footer of a whole file, with its length and PAR1, if all bytes match their digests; else None."""
    view = memoryview(data)
    start = _footer_start(view) if len(data) > _FOOTER_END else 0
    if start < _TRAILER.size:
        return None
    num_bytes = _TRAILER.unpack_from(view, start - _TRAILER.size)[0]
    is_sound = num_bytes < start and _block(view[:num_bytes], view[start:]) == view[num_bytes:start]
    return bytes(view[start:]) if is_sound else None


def seal_file(path: Path) -> None:
    """Add the digests to a local file, which must be complete and not yet visible to readers."""
    with pa.memory_map(str(path)) as mapped:
        view = memoryview(mapped.read_buffer()).cast("B")
        start = _footer_start(view)
        end = _block(view[:start], view[start:]) + bytes(view[start:])
    with path.open("r+b") as file:
        file.seek(start)
        file.write(end)


def _footer_start(view: memoryview) -> int:
    return len(view) - _FOOTER_END - int.from_bytes(view[-_FOOTER_END:-4], "little")


def _block(content: memoryview, footer: memoryview) -> bytes:
    """Return the block of digests. content: all bytes before the block."""
    pages = _digest_pages(content).tobytes()
    own = _TRAILER.pack(len(content), xxh3_64_intdigest(footer), _MAGIC, 0)[:-8]
    return pages + own + xxh3_64_intdigest(pages + own).to_bytes(8, "little")


def _digest_pages(view: memoryview) -> np.ndarray:
    """Return the digest of each page: (num_pages,) uint64."""
    pages = [view[start : start + PAGE_BYTES] for start in range(0, len(view), PAGE_BYTES)]
    return np.array([xxh3_64_intdigest(page) for page in pages], "<u8")


def read_end(source: BinaryIO) -> bytes:
    """Read the trailer (if there is one), the footer, its length and PAR1; empty if there is no footer."""
    size = source.seek(0, io.SEEK_END)
    source.seek(max(0, size - _FOOTER_END))
    length = int.from_bytes(source.read(_FOOTER_END)[:4], "little") + _FOOTER_END
    if not _FOOTER_END < length < size:
        return b""
    source.seek(max(0, size - length - _TRAILER.size))
    return source.read(size)


@dataclass(frozen=True, slots=True)
class Digests:
    """Page digests of the first `num_bytes` bytes of a file, which come before the digests themselves."""

    num_bytes: int
    pages: np.ndarray
    """(num_pages,) uint64."""


def parse_end(source: BinaryIO, end: bytes, where: str) -> tuple[pq.FileMetaData, Digests | None]:
    """Parse the footer and the digests of a file; the digests are None if the file has none.

    end: as returned by `read_end`. Raises SchemaError if footer and digests don't match, and pyarrow's error if the
    footer can't be read.
    """
    footer_start = len(end) - _FOOTER_END - int.from_bytes(end[-_FOOTER_END:-4], "little")
    trailer, footer = end[:footer_start], end[footer_start:]
    if len(trailer) < _TRAILER.size or _TRAILER.unpack(trailer)[2] != _MAGIC:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        return metadata, _lost_digests(source, len(end)) if DIGESTS_KEY in (metadata.metadata or {}) else None
    num_bytes, of_footer, _, of_block = _TRAILER.unpack(trailer)
    if xxh3_64_intdigest(footer) != of_footer:
        raise SchemaError(_damage(where, "its footer does not match its digest"))
    pages = _read_pages(source, num_bytes, len(end))
    if xxh3_64_intdigest(pages + trailer[:-8]) != of_block:
        raise SchemaError(_damage(where, "its digests do not match their own digest"))
    return pq.read_metadata(pa.BufferReader(footer)), Digests(num_bytes, np.frombuffer(pages, "<u8"))


def _lost_digests(source: BinaryIO, end_size: int) -> Digests:
    """Return digests that no page matches, for a file with DIGESTS_KEY but without digests.

    They were lost, or another program wrote the file with ludic's footer entries. The footer can still be read,
    since it may show that a newer ludic wrote the file.
    """
    num_bytes = source.seek(0, io.SEEK_END) - end_size
    return Digests(num_bytes, np.zeros(-(-num_bytes // PAGE_BYTES), "<u8"))


def _read_pages(source: BinaryIO, num_bytes: int, end_size: int) -> bytes:
    """Read the page digests, which lie between the pages and the end; empty if their size does not fit there."""
    stop = source.seek(0, io.SEEK_END) - end_size
    if stop - num_bytes != 8 * -(-num_bytes // PAGE_BYTES):
        return b""
    source.seek(num_bytes)
    return source.read(stop - num_bytes)


def _damage(where: str, what: str) -> str:
    return (
        f"{where}: {what}, so a disk, a copy or another program has changed it; put a sound copy in its place, or let "
        "`ludic verify --repair` quarantine it"
    )


def _read_buffer(source: BinaryIO, num_bytes: int) -> pa.Buffer:
    """Read without a copy where the source allows: copying 2 MB takes half as long as reading their columns."""
    if isinstance(source, pa.NativeFile):
        return source.read_buffer(num_bytes)
    if isinstance(source, MemoryFile):
        start = source.tell()
        return pa.py_buffer(source.data)[start : start + num_bytes]
    return pa.py_buffer(source.read(num_bytes))


class CheckedFile:
    """The part of a Parquet file before its digests, for random reads; raises SchemaError if a page does not match."""

    closed = False

    def __init__(self, source: BinaryIO, digests: Digests, where: str) -> None:
        """digests: as returned by `parse_end`. where: names the file in errors."""
        self._source, self._pages, self.size, self._where = source, digests.pages, digests.num_bytes, where
        self._position = 0
        self._start, self._data = 0, pa.py_buffer(b"")
        """Offset and bytes of the pages that were read last, kept because small columns share a page."""
        self._unread = np.ones(len(digests.pages), bool)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read_buffer(self, num_bytes: int) -> pa.Buffer:
        """Read without a copy; Arrow calls this instead of `read`."""
        start, stop = self._position, min(self._position + num_bytes, self.size)
        if not self._start <= start <= stop <= self._start + self._data.size:
            self._load(start // PAGE_BYTES, -(-stop // PAGE_BYTES))
        self._position = stop
        return self._data[start - self._start : stop - self._start]

    def read(self, num_bytes: int) -> bytes:
        return self.read_buffer(num_bytes).to_pybytes()

    def check_rest(self) -> None:
        """Check the pages that were not read."""
        for page in np.flatnonzero(self._unread).tolist():
            self._load(page, page + 1)

    def close(self) -> None:
        """Do nothing: the caller that opened the source closes it."""

    def _load(self, first: int, last: int) -> None:
        """Read and check the pages from `first` up to, not including, `last`."""
        start, stop = first * PAGE_BYTES, min(last * PAGE_BYTES, self.size)
        self._source.seek(start)
        self._data = _read_buffer(self._source, stop - start)
        self._start = start
        broken = np.flatnonzero(_digest_pages(memoryview(self._data)) != self._pages[first:last])
        if len(broken):
            self._data = pa.py_buffer(b"")
            start += PAGE_BYTES * int(broken[0])
            raise SchemaError(
                _damage(self._where, f"the {PAGE_BYTES:,} bytes from {start:,} on do not match their digest")
            )
        self._unread[first:last] = False


# --- Writing --------------------------------------------------------------------------------------------------
# Encode tables as Parquet bytes; for rollouts, choose the encodings, statistics and row groups.


# Measured with rollouts of 1,000 tokens, 128 groups of 8 in a file, by rows per row group. Tokens and logprobs compress
# only from about 250,000 tokens up, since zstd's blocks of 128 kB then hold one byte of each number.
#     rows    bytes a token    one group's tokens    one row, all columns    all tokens
#       64             7.52                4.0 ms                  7.2 ms    63 M a second
#      256             7.16                4.4 ms                  9.6 ms    85 M a second
#    1,024             7.11               10.8 ms                 19.6 ms    92 M a second
ROW_GROUP_ROWS = 256
"""Maximum rows of a row group that several groups share; a larger group has its own row group."""
ROW_GROUP_BYTES = 64 << 20
"""Maximum bytes in memory of a row group that several groups share: long rollouts are read in bounded pieces."""
LARGEST_GROUP_BYTES = 512 << 20
"""A larger group is split between rows: pyarrow can't read a row group with 2 GiB of text in messages."""

# Statistics only for columns that prune: each further column costs 50 bytes of footer per row group.
_STATISTICS = ["group_id", "rollout_id", "policy_version", "env_name", "created_at"]
# Texts that may be long. Compressing all other columns too, of a few bytes per row each, would save 0.01 bytes a token,
# and make the encoding of one group take two thirds longer.
_LONG_TEXTS = {
    *("rollout_id", "episode_id", "error", "traceback", "example_columns"),
    *("content", "action", "observation", "next_observation", "arguments", "result", "value"),
}
_PLAIN_OPTIONS = {"compression": "zstd", "compression_level": 1}
"""Options of a ParquetWriter for tables other than rollouts."""
_DICTIONARY_ROWS = 64
"""Fewest rows that are encoded with dictionaries; fewer rows are smaller without."""
_ENCODINGS = {
    f"{column.name}{'.list.element' * column.num_dimensions}": column.encoding
    for column in array_columns().values()
    if column.encoding is not None
}
"""Encoding of the numbers of an array, by the path of its leaf."""


def encode(table: pa.Table) -> bytes:
    """Encode a rollouts table whose groups are contiguous as Parquet, with the row groups of `row_group_bounds`."""
    assert table.num_rows, "a file without rows"
    sink = pa.BufferOutputStream()  # Arrow writes to a BytesIO through Python, which takes a third longer
    options = writer_options(table.schema, dictionaries=table.num_rows >= _DICTIONARY_ROWS)
    with _open(sink, table.schema, {}, options) as writer:
        for start, stop in row_group_bounds(table):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)
    return seal(sink.getvalue())


@contextmanager
def open_writer(
    path: Path, schema: pa.Schema, metadata: Mapping[bytes, bytes] | None = None, *, plain_table: str | None = None
) -> Iterator[pq.ParquetWriter]:
    """Open a local rollouts file to write row group by row group; it is complete at the end of the block.

    metadata: footer entries to add to the schema's own, such as the sources of a compacted file.
    plain_table: the file holds this other table, and is encoded as encode_plain does.
    To write a row group, call write_table with whole groups and row_group_size set to their number of rows.
    """
    options = writer_options(schema, dictionaries=True) if plain_table is None else plain_options(plain_table)
    with _open(str(path), schema, metadata or {}, options) as writer:
        yield writer
    seal_file(path)


def _open(
    sink: str | pa.NativeFile, schema: pa.Schema, metadata: Mapping[bytes, bytes], options: Mapping[str, Any]
) -> pq.ParquetWriter:
    writer = pq.ParquetWriter(sink, schema, **options)
    writer.add_key_value_metadata({**(schema.metadata or {}), **metadata, DIGESTS_KEY: b"1"})
    return writer


@functools.cache
def plain_options(table: str) -> Mapping[str, Any]:
    """Return the options of a ParquetWriter for a table other than rollouts, by the encodings in its schema."""
    arrays = [ArrayColumn.of(column) for column in load_table(table).columns if "encoding" in column.catalogue]
    if not arrays:
        return _PLAIN_OPTIONS
    encodings = {f"{column.name}{'.list.element' * column.num_dimensions}": column.encoding for column in arrays}
    bound = next(row.merged_by for row in FILE_KINDS if isinstance(row, Table) and row.table == table)
    own = {"use_dictionary": False, "column_encoding": encodings, "write_statistics": [bound]}
    return {**_PLAIN_OPTIONS, **own}


def encode_plain(table: pa.Table, **options: Any) -> bytes:
    """Encode a table other than rollouts as Parquet, such as a step's ledger. options: passed to pq.write_table."""
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), DIGESTS_KEY: b"1"})
    pq.write_table(table, sink, **{**_PLAIN_OPTIONS, **options})
    return seal(sink.getvalue())


def release_memory(size_bytes: int) -> None:
    """Return Arrow's unused memory to the system after work on a large table of `size_bytes`; else it accumulates.

    Does nothing after a small table: new memory pages cost ten times as much as a copy into them.
    """
    if size_bytes > ROW_GROUP_BYTES:
        pa.default_memory_pool().release_unused()


@functools.cache
def writer_options(schema: pa.Schema, *, dictionaries: bool) -> dict:
    """Return options of a ParquetWriter: byte streams for token ids and logprobs; zstd level 1 for long columns.

    dictionaries: whether columns other than the per-token numbers are dictionary-encoded at first.
    benchmarks/store_size.py has the figures. The footer leaves out Arrow's own schema, which would be 7 of 16 kB and
    adds nothing to Parquet's schema.
    """
    columns = _leaves(schema)
    long = [path for path, is_text in columns.items() if _is_long(schema, path, is_text)]
    coded = [path for path in columns if path not in _ENCODINGS] if dictionaries else False
    return {
        "compression": dict.fromkeys(long, "zstd"),
        "compression_level": dict.fromkeys(long, 1),
        "use_dictionary": coded,
        "column_encoding": _ENCODINGS,
        "write_statistics": _STATISTICS,
        "store_schema": False,
    }


def _is_long(schema: pa.Schema, path: str, is_text: bool) -> bool:
    """Return whether a column may be long: a list of plain values, or a text in _LONG_TEXTS or a run's own column."""
    column, field = path.partition(".")[0], path.rpartition(".")[2]
    type_ = schema.field(column).type
    while pa.types.is_list(type_):
        type_ = type_.value_type
    is_plain_list = pa.types.is_list(schema.field(column).type) and not pa.types.is_nested(type_)
    return is_plain_list or (is_text and (field in _LONG_TEXTS or column.startswith("x_")))


def _leaves(schema: pa.Schema) -> dict[str, bool]:
    """Return the Parquet path of each leaf column, and whether it holds text; only a written file shows them."""
    sink = io.BytesIO()
    pq.write_table(schema.empty_table(), sink)
    parquet = pq.ParquetFile(sink).schema
    return {leaf.path: leaf.physical_type == "BYTE_ARRAY" for leaf in map(parquet.column, range(len(parquet)))}


def row_group_bounds(
    table: pa.Table, *, max_rows: int = ROW_GROUP_ROWS, max_bytes: int = ROW_GROUP_BYTES, column: str = "group_id"
) -> list[tuple[int, int]]:
    """Return [start, stop) of each row group: as many whole groups as fit; a group too large to share has its own.

    column: whose equal values make a group.
    """
    if table.num_rows <= max_rows and table.get_total_buffer_size() <= max_bytes:
        return [(0, table.num_rows)]
    bounds: list[tuple[int, int]] = []
    begin, size_bytes = 0, 0
    for start, stop, piece_bytes in _pieces(table, max_bytes, column):
        if start > begin and (stop - begin > max_rows or size_bytes + piece_bytes > max_bytes):
            bounds.append((begin, start))
            begin, size_bytes = start, 0
        size_bytes += piece_bytes
    return [*bounds, (begin, table.num_rows)]


def _pieces(table: pa.Table, max_bytes: int, column: str) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and bytes in memory of each unsplittable piece: a group, or a row of a too large group."""
    starts = group_starts(table, column).tolist()
    # Measuring takes 0.1 ms a group (48 columns), so a small table is not measured. The buffers may hold more than the
    # table.
    is_small = table.get_total_buffer_size() <= max_bytes
    for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True):
        size_bytes = 0 if is_small else table.slice(start, stop - start).nbytes
        if size_bytes > LARGEST_GROUP_BYTES:
            yield from ((row, row + 1, table.slice(row, 1).nbytes) for row in range(start, stop))
        else:
            yield start, stop, size_bytes


def group_starts(table: pa.Table, column: str = "group_id") -> np.ndarray:
    """Return the first row of each run of equal group_ids, or of other ids: (num_groups,) int64."""
    ids = table.column(column).to_numpy()
    return np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, dtype=np.int64)


# --- Reading --------------------------------------------------------------------------------------------------
# Open and check Parquet files; read those of rollouts by row groups, rows or columns.


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
            with open_checked(source, where, table, pre_buffer=ahead, parse=_parse_known) as (file, checked):
                _check_schema(file, table, where)
                if whole and checked is not None:
                    checked.check_rest()
                yield file
        except (LudicError, FileNotFoundError):
            raise
        except UNREADABLE as error:
            if is_broken(root, name):
                raise SchemaError(
                    f"{where}: not a Parquet file, or a broken one, of {source.seek(0, io.SEEK_END)} bytes "
                    f"({one_line(error)}); "
                    f"it is quarantined; `ludic verify {root.url}` lists all such files"
                ) from error
            raise StoreError(f"{where}: {type(error).__name__}: {one_line(error)}") from error


@contextmanager
def open_checked(
    source: BinaryIO, where: str, table: str, *, pre_buffer: bool = False, parse: Parse = parse_end
) -> Iterator[tuple[pq.ParquetFile, CheckedFile | None]]:
    """Open a Parquet file of a table, with the CheckedFile that checks its bytes as they are read.

    The CheckedFile is None if the file has no digests. Raises SchemaError, naming `where`, if bytes do not match their
    digest or the file has more rows than ludic reads, and pyarrow's errors for other damage.
    """
    end = read_end(source)
    metadata, digests = parse(source, end, where) if end else (None, None)
    checked = CheckedFile(source, digests, where) if digests else None
    is_small = checked is not None and checked.size <= _SMALL_BYTES
    data = pa.BufferReader(checked.read_buffer(checked.size)) if checked and is_small else checked or source
    with pq.ParquetFile(data, metadata=metadata, pre_buffer=pre_buffer) as file:
        _check_rows(file.metadata, table, where)
        yield file, checked


def _parse_known(source: BinaryIO, end: bytes, where: str) -> tuple[pq.FileMetaData, Digests | None]:
    """Parse the end of a file with parse_end, unless an equal end was parsed recently.

    If so, this file's block of page digests is not read, and damage to the block is not detected.
    """
    found = _ends.get(end) or parse_end(source, end, where)
    if len(end) <= _LARGEST_END:
        _ends[end] = found
    if len(_ends) > _MOST_ENDS:
        with suppress(KeyError):  # another thread may be faster
            _ends.popitem(last=False)
    return found


def decode(data: bytes, where: str, table: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return all rows of a small file of a table. Raises SchemaError, naming `where`, if it is broken or too large.

    columns: to decode, of those that the file has; None decodes all.
    """
    try:
        with open_checked(io.BytesIO(data), where, table) as (file, checked):
            rows = read_within(file, range(file.num_row_groups), columns, where, MOST_FILE_BYTES)
            if checked:
                checked.check_rest()
    except SchemaError:
        raise
    except UNREADABLE as error:
        raise SchemaError(
            f"{where}: not a Parquet file, or a broken one, of {len(data)} bytes ({one_line(error)})"
        ) from error
    check_text(rows, where)
    return rows


def check_text(rows: pa.Table | pa.RecordBatch, where: str) -> None:
    """Raise SchemaError if the text of a column is not UTF-8, which Arrow itself does not check."""
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        if not _holds_text(column.type):
            continue
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            what = "text that is not UTF-8" if "UTF8" in str(error) else f"a broken {column.type}"
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
            read_within(file, [row_group], None, name)
    except UNREADABLE:
        return True
    return False


def read_rows(root: Root, name: str, addresses: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
    """Return columns of single rows, in the order of `addresses`; reads only the row groups that they name.

    addresses: row group, and index of the row in it. Columns that a file of an older schema lacks are null.
    """
    row_groups = sorted({row_group for row_group, _ in addresses})
    schema = rollouts_schema(root.extra_columns)
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
    schema = rollouts_schema(root.extra_columns)
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
    Columns that a file of an older schema lacks are null, except as `with_capture` says. Raises SchemaError, naming
    `where`, for a forbidden null.
    """
    wants_metadata = CAPTURE in columns and CAPTURE not in file.schema_arrow.names
    read = dict.fromkeys([*columns, _METADATA] if wants_metadata else columns)
    table = _read(file, list(row_groups), list(read), where)
    check_text(table, where)
    table = with_capture(table)
    wanted = pa.schema([(schema or arrow_schema("rollouts")).field(column) for column in columns])
    return as_schema(table, wanted, where)


CAPTURE, _METADATA = "capture", "metadata"


def with_capture(table: pa.Table) -> pa.Table:
    """Return rows of rollouts with the column `capture`, which for rows of an older schema follows from their metadata.

    Before rollouts 1.8 an import marked rows without stored logprobs, with or without recorded token ids, by
    metadata['logprobs'] = 'absent'; the SQL macro capture_of applies the same rule.
    """
    if CAPTURE in table.column_names or _METADATA not in table.column_names:
        return table
    is_absent = pc.equal(pc.map_lookup(table[_METADATA], "logprobs", "first"), "absent")
    text, unknown = pa.scalar("text"), pa.scalar(None, pa.string())
    return table.append_column(CAPTURE, pc.if_else(pc.fill_null(is_absent, False), text, unknown))


def _read(file: pq.ParquetFile, row_groups: list[int], columns: list[str], where: str) -> pa.Table:
    """Return columns of row groups, without the columns that the file lacks."""
    try:
        return read_within(file, row_groups, columns, where)
    except pa.ArrowNotImplementedError:
        # More than 2 GiB of nested text, which pyarrow can't return as one array.
        if len(row_groups) == 1:
            raise
    return pa.concat_tables([_read(file, [row_group], columns, where) for row_group in row_groups])


# --- Limits ---------------------------------------------------------------------------------------------------
# A hostile or broken file of some kilobytes may hold millions of equal rows, a list of a billion equal values, or a
# million times one text of 100 MB: Parquet stores a repetition once. So rows and values are counted by the footer
# before they are read, and texts as they are read.


MOST_ROW_GROUP_ROWS = 1 << 20
"""Maximum rows of a row group that ludic reads; it writes as many as a group has, or 65,536."""
MOST_ROW_GROUP_BYTES = 4 * LARGEST_GROUP_BYTES
"""Maximum bytes in memory of the rows of a row group that ludic reads."""
MOST_FILE_BYTES = 256 << 20
"""Maximum bytes in memory of a file that is read whole."""

_MOST_ROWS = {row.table: row.most_rows for row in FILE_KINDS if isinstance(row, Table)}
_types: tuple[pq.ParquetSchema, Mapping[str, Sequence[tuple[int, str]]]] | None = None
"""The last schema that _types_by_column saw, and what it returned."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4}
"""Bytes in memory of a value by its Parquet type, for a text those of its offset; 8 for other types."""


def _check_rows(metadata: pq.FileMetaData, table: str, where: str) -> None:
    """Raise SchemaError if a file has more rows than ludic reads of a table."""
    counts = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    limits = (sum(counts), _MOST_ROWS[table], "file"), (max(counts, default=0), MOST_ROW_GROUP_ROWS, "row group")
    for num_rows, most, what in limits:
        if num_rows > most:
            raise SchemaError(_too_large(where, f"it holds {num_rows:,} rows", f"{most:,} in a {what} of {table}"))


def _too_large(where: str, found: str, most: str) -> str:
    return (
        f"{where}: {found}, wanted at most {most}; ludic does not read it, since it would fill the memory: move it out "
        "of the run, or let `ludic verify --repair` quarantine it"
    )


def read_within(
    file: pq.ParquetFile,
    row_groups: Sequence[int],
    columns: Sequence[str] | None,
    where: str,
    most_bytes: int | None = None,
) -> pa.Table:
    """Return columns of row groups, those that the file has; None returns all.

    most_bytes: in memory; None allows each row group MOST_ROW_GROUP_BYTES. Raises SchemaError, naming `where`, if the
    rows take more, before they do.
    """
    most = most_bytes or MOST_ROW_GROUP_BYTES * len(row_groups)
    text_bytes, num_texts = _check_values(file, row_groups, columns, where, most)
    if text_bytes * num_texts <= most:
        return file.read_row_groups(row_groups, columns=columns, use_threads=False)
    batches = list(batches_within(file, row_groups, columns, where, most))
    schema = batches[0].schema if batches else file.schema_arrow
    return pa.Table.from_batches(batches, schema)


def batches_within(
    file: pq.ParquetFile,
    row_groups: Sequence[int],
    columns: Sequence[str] | None,
    where: str,
    most_bytes: int,
    batch_rows: int = MOST_ROW_GROUP_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Yield columns of row groups, at most `batch_rows` rows at a time.

    Raises SchemaError, naming `where`, once the rows take more than `most_bytes` in memory.
    """
    text_bytes, _ = _check_values(file, row_groups, columns, where, most_bytes)
    size_bytes = 0
    # Any text may be as long as all stored texts together.
    batch_rows = max(1, min(batch_rows, most_bytes // max(1, text_bytes)))
    for batch in file.iter_batches(batch_rows, row_groups=row_groups, columns=columns, use_threads=False):
        size_bytes += batch.nbytes
        if size_bytes > most_bytes:
            raise SchemaError(_too_large(where, f"its rows take over {most_bytes:,} bytes of memory", "that"))
        yield batch


def _check_values(
    file: pq.ParquetFile, row_groups: Iterable[int], columns: Collection[str] | None, where: str, most_bytes: int
) -> tuple[int, int]:
    """Check by the footer that the values of some columns fit into memory; returns stored bytes and number of texts.

    Raises SchemaError, naming `where`, if all but the texts take more than `most_bytes`.
    """
    by_column = _types_by_column(file.schema)
    types = [type_ for column in (by_column if columns is None else columns) for type_ in by_column.get(column, ())]
    size_bytes = text_bytes = num_texts = 0
    for row_group in map(file.metadata.row_group, row_groups):
        for index, type_ in types:
            chunk = row_group.column(index)
            size_bytes += chunk.num_values * _WIDTHS.get(type_, 8)
            if type_ == "BYTE_ARRAY":
                text_bytes += chunk.total_uncompressed_size
                num_texts += chunk.num_values
    if size_bytes > most_bytes:
        raise SchemaError(_too_large(where, f"its values take {size_bytes:,} bytes of memory", f"{most_bytes:,}"))
    return text_bytes, num_texts


def _types_by_column(schema: pq.ParquetSchema) -> Mapping[str, Sequence[tuple[int, str]]]:
    """Return index and type of each leaf, by column; cached for the last schema, since schemas are slow to inspect."""
    global _types
    known = _types
    if known is None or not known[0].equals(schema):
        found: dict[str, list[tuple[int, str]]] = {}
        for index, leaf in enumerate(map(schema.column, range(len(schema)))):
            found.setdefault(leaf.path.partition(".")[0], []).append((index, leaf.physical_type))
        known = _types = schema, found
    return known[1]
