"""Read columns of many small files of workers in one pass: 0.5 ms a file in Polars instead of 2 ms in pyarrow.

A file is read here only if all its bytes match its digests, its footer has the schema of a file that `open_parquet`
accepted, and it has one row group. All other files (large, damaged, without digests, written by another program,
deleted) are left out: the caller reads them one by one, with all checks and errors.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ludic.errors import LudicError
from ludic.schema import as_schema, rollouts_schema
from ludic.schema.tables import TABLE_KEY, VERSION_KEY
from ludic.store.files import RolloutFile
from ludic.store.parquet import open_parquet, sound_footer
from ludic.store.root import Root

MANY_FILES = 64
"""Number of files above which one pass is worth the import of Polars, which takes 0.2 s."""

_LARGEST_BYTES = 1 << 20
"""Maximum size of a file that is read whole; opening a remote file fetches as much anyway."""
_BATCH_BYTES = 16 << 20
_LOCAL, _REMOTE = (2, 256), (32, 32)
"""Number of threads, and of files that a thread reads at once: Polars keeps about one core busy."""
# Thrift, in a footer just after the schema: num_rows, an i64, and the head of a list with one row group.
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
    schema = rollouts_schema(root.run.extra_columns)
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
    return _Content(file, data, num_rows) if data is not None and is_known and num_rows else None


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
        num_bytes += len(content.data)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _parse(batch: Sequence[_Content], wanted: pa.Schema) -> pa.Table | None:
    """Return columns of all rows of a batch; returns None if a file has to be read on its own."""
    import polars as pl  # here, since a run of few files does not need it

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
