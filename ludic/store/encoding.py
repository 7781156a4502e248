"""How a table of rollouts becomes Parquet bytes: encodings, statistics and row groups."""

import functools
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.store.digests import DIGESTS_KEY, seal, seal_file

# Rollouts of 1,000 tokens, 128 groups of 8 in a file, by rows a row group (tokens and logprobs compress only from some
# 250,000 tokens on, since zstd's blocks of 128 kB then hold one byte of each number):
#     rows    bytes a token    one group's tokens    one row, all columns    all tokens
#       64             7.52                4.0 ms                  7.2 ms    63 M a second
#      256             7.16                4.4 ms                  9.6 ms    85 M a second
#    1,024             7.11               10.8 ms                 19.6 ms    92 M a second
ROW_GROUP_ROWS = 256
"""Groups share a row group up to so many rows; a larger one has its own."""
ROW_GROUP_BYTES = 64 << 20
"""And up to so many bytes in memory, so that long rollouts are read in bounded pieces."""
LARGEST_GROUP_BYTES = 512 << 20
"""A larger group is split by rows after all: pyarrow can't read a row group with 2 GiB of text in messages."""

# Statistics only on what prunes: each further column costs 50 bytes of footer a row group.
_STATISTICS = ["group_id", "rollout_id", "policy_version", "env_name", "created_at"]
# What may be long. To compress all other columns too, of some bytes a row each, would save 0.01 bytes a token, and make
# the encoding of one group take two thirds longer.
_LONG_TEXTS = {
    *("rollout_id", "episode_id", "error"),
    *("content", "action", "observation", "next_observation", "arguments", "result", "value"),
}
_DICTIONARY_ROWS = 64
"""Fewer rows are larger with dictionaries than without."""
_NUMBER_LISTS = [
    f"{name}.list.element" for name in ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards")
]


def encode(table: pa.Table) -> bytes:
    """Parquet bytes of a rollouts table whose groups are contiguous; row_group_bounds says where it is cut."""
    assert table.num_rows, "a file without rows"
    sink = pa.BufferOutputStream()  # a BytesIO, which Arrow writes to through Python, takes a third longer
    with _open(sink, table.schema, {}, dictionaries=table.num_rows >= _DICTIONARY_ROWS) as writer:
        for start, stop in row_group_bounds(table):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)
    return seal(sink.getvalue())


@contextmanager
def open_writer(
    path: Path, schema: pa.Schema, metadata: Mapping[bytes, bytes] | None = None
) -> Iterator[pq.ParquetWriter]:
    """A local rollouts file to write row group by row group; it is complete at the end of the block.

    metadata: footer entries beside the schema's own, such as the sources of a compacted file.
    One write_table of a whole number of groups, with row_group_size its number of rows, makes one row group.
    """
    with _open(str(path), schema, metadata or {}, dictionaries=True) as writer:
        yield writer
    seal_file(path)


def _open(
    sink: str | pa.NativeFile, schema: pa.Schema, metadata: Mapping[bytes, bytes], *, dictionaries: bool
) -> pq.ParquetWriter:
    """dictionaries: whether columns other than numbers of tokens begin as such."""
    writer = pq.ParquetWriter(sink, schema, **writer_options(schema, dictionaries=dictionaries))
    writer.add_key_value_metadata({**(schema.metadata or {}), **metadata, DIGESTS_KEY: b"1"})
    return writer


def encode_plain(table: pa.Table, **options: Any) -> bytes:
    """Parquet bytes of a table that is no rollouts table, such as the ledger of a step. options: of pq.write_table."""
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), DIGESTS_KEY: b"1"})
    pq.write_table(table, sink, compression="zstd", compression_level=1, **options)
    return seal(sink.getvalue())


def release_memory(size_bytes: int) -> None:
    """Give back what Arrow keeps for later, once so many bytes were worked on; after large ones it would pile up.

    Not after small ones: pages that are new cost ten times what a copy into them does.
    """
    if size_bytes > ROW_GROUP_BYTES:
        pa.default_memory_pool().release_unused()


@functools.cache
def writer_options(schema: pa.Schema, *, dictionaries: bool) -> dict:
    """Of a ParquetWriter: token ids and logprobs as byte streams; zstd level 1 where there is something to compress.

    benchmarks/store_size.py has the figures. Arrow's own schema is left out of the footer: Parquet's says as much,
    and it would be 7 of 16 kB.
    """
    columns = _leaves(schema)
    long = [path for path, is_text in columns.items() if _is_long(schema, path, is_text)]
    coded = [path for path in columns if path not in _NUMBER_LISTS] if dictionaries else False
    return {
        "compression": dict.fromkeys(long, "zstd"),
        "compression_level": dict.fromkeys(long, 1),
        "use_dictionary": coded,
        "column_encoding": dict.fromkeys(_NUMBER_LISTS, "BYTE_STREAM_SPLIT"),
        "write_statistics": _STATISTICS,
        "store_schema": False,
    }


def _is_long(schema: pa.Schema, path: str, is_text: bool) -> bool:
    """Whether a column may hold much: lists of plain values, a run's own columns, and texts that are no names."""
    column, field = path.partition(".")[0], path.rpartition(".")[2]
    type_ = schema.field(column).type
    is_plain_list = pa.types.is_list(type_) and not pa.types.is_nested(type_.value_type)
    return is_plain_list or (is_text and (field in _LONG_TEXTS or column.startswith("x_")))


def _leaves(schema: pa.Schema) -> dict[str, bool]:
    """Parquet's paths of the columns, nested ones too, and whether each holds text; only a file can tell."""
    sink = io.BytesIO()
    pq.write_table(schema.empty_table(), sink)
    parquet = pq.ParquetFile(sink).schema
    return {leaf.path: leaf.physical_type == "BYTE_ARRAY" for leaf in map(parquet.column, range(len(parquet)))}


def row_group_bounds(
    table: pa.Table, *, max_rows: int = ROW_GROUP_ROWS, max_bytes: int = ROW_GROUP_BYTES
) -> list[tuple[int, int]]:
    """[start, stop) of each row group: whole groups, as many as fit; one that alone is too large has its own."""
    if table.num_rows <= max_rows and table.get_total_buffer_size() <= max_bytes:
        return [(0, table.num_rows)]
    bounds: list[tuple[int, int]] = []
    begin, size_bytes = 0, 0
    for start, stop, piece_bytes in _pieces(table, max_bytes):
        if start > begin and (stop - begin > max_rows or size_bytes + piece_bytes > max_bytes):
            bounds.append((begin, start))
            begin, size_bytes = start, 0
        size_bytes += piece_bytes
    return [*bounds, (begin, table.num_rows)]


def _pieces(table: pa.Table, max_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Start, stop and bytes in memory of what is not split: groups, and rows of one that is too large to read."""
    starts = group_starts(table).tolist()
    # Groups are measured only where it matters: 0.1 ms each (48 columns). The buffers may hold more than the table.
    is_small = table.get_total_buffer_size() <= max_bytes
    for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True):
        size_bytes = 0 if is_small else table.slice(start, stop - start).nbytes
        if size_bytes > LARGEST_GROUP_BYTES:
            yield from ((row, row + 1, table.slice(row, 1).nbytes) for row in range(start, stop))
        else:
            yield start, stop, size_bytes


def group_starts(table: pa.Table) -> np.ndarray:
    """(num_groups,) int64: the first row of each run of equal group_ids."""
    ids = table.column("group_id").to_numpy()
    return np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, dtype=np.int64)
