"""Encode tables as Parquet bytes; for rollouts, choose the encodings, statistics and row groups."""

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

# Measured with rollouts of 1,000 tokens, 128 groups of 8 in a file, by rows per row group. Tokens and logprobs compress
# only from about 250,000 tokens up, since zstd's blocks of 128 kB then hold one byte of each number.
#     rows    bytes a token    one group's tokens    one row, all columns    all tokens
#       64             7.52                4.0 ms                  7.2 ms    63 M a second
#      256             7.16                4.4 ms                  9.6 ms    85 M a second
#    1,024             7.11               10.8 ms                 19.6 ms    92 M a second
ROW_GROUP_ROWS = 256
"""Most rows of a row group that several groups share; a larger group has its own row group."""
ROW_GROUP_BYTES = 64 << 20
"""Most bytes in memory of a row group that several groups share, so that long rollouts are read in bounded pieces."""
LARGEST_GROUP_BYTES = 512 << 20
"""A larger group is split between rows: pyarrow can't read a row group with 2 GiB of text in messages."""

# Statistics only for columns that prune: each further column costs 50 bytes of footer per row group.
_STATISTICS = ["group_id", "rollout_id", "policy_version", "env_name", "created_at"]
# Texts that may be long. Compressing all other columns too, of a few bytes per row each, would save 0.01 bytes a token,
# and make the encoding of one group take two thirds longer.
_LONG_TEXTS = {
    *("rollout_id", "episode_id", "error"),
    *("content", "action", "observation", "next_observation", "arguments", "result", "value"),
}
_PLAIN_OPTIONS = {"compression": "zstd", "compression_level": 1}
"""Options of a ParquetWriter for tables other than rollouts."""
_DICTIONARY_ROWS = 64
"""Fewest rows that are encoded with dictionaries; fewer rows are smaller without."""
_NUMBER_LISTS = [
    f"{name}.list.element"
    for name in ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards", "kept_tokens.list.element")
]


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
    path: Path, schema: pa.Schema, metadata: Mapping[bytes, bytes] | None = None, *, is_plain: bool = False
) -> Iterator[pq.ParquetWriter]:
    """Open a local rollouts file to write row group by row group; it is complete at the end of the block.

    metadata: footer entries to add to the schema's own, such as the sources of a compacted file.
    is_plain: the file holds another table, and is encoded as encode_plain does.
    To write a row group, call write_table with whole groups and row_group_size set to their number of rows.
    """
    options = _PLAIN_OPTIONS if is_plain else writer_options(schema, dictionaries=True)
    with _open(str(path), schema, metadata or {}, options) as writer:
        yield writer
    seal_file(path)


def _open(
    sink: str | pa.NativeFile, schema: pa.Schema, metadata: Mapping[bytes, bytes], options: Mapping[str, Any]
) -> pq.ParquetWriter:
    writer = pq.ParquetWriter(sink, schema, **options)
    writer.add_key_value_metadata({**(schema.metadata or {}), **metadata, DIGESTS_KEY: b"1"})
    return writer


def encode_plain(table: pa.Table, **options: Any) -> bytes:
    """Encode a table other than rollouts as Parquet, such as a step's ledger. options: passed to pq.write_table."""
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), DIGESTS_KEY: b"1"})
    pq.write_table(table, sink, **_PLAIN_OPTIONS, **options)
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
    table: pa.Table, *, max_rows: int = ROW_GROUP_ROWS, max_bytes: int = ROW_GROUP_BYTES
) -> list[tuple[int, int]]:
    """Return [start, stop) of each row group: as many whole groups as fit; a group too large to share has its own."""
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
    """Yield start, stop and bytes in memory of each unsplittable piece: a group, or a row of a too large group."""
    starts = group_starts(table).tolist()
    # Measuring takes 0.1 ms a group (48 columns), so it is left out for a small table. The buffers may hold more than
    # the table.
    is_small = table.get_total_buffer_size() <= max_bytes
    for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True):
        size_bytes = 0 if is_small else table.slice(start, stop - start).nbytes
        if size_bytes > LARGEST_GROUP_BYTES:
            yield from ((row, row + 1, table.slice(row, 1).nbytes) for row in range(start, stop))
        else:
            yield start, stop, size_bytes


def group_starts(table: pa.Table) -> np.ndarray:
    """Return the first row of each run of equal group_ids: (num_groups,) int64."""
    ids = table.column("group_id").to_numpy()
    return np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, dtype=np.int64)
