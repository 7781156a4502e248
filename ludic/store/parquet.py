"""How a table becomes Parquet bytes, and comes back: encodings, row groups, checked reads."""

import functools
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import LudicError, SchemaError, StoreError
from ludic.schema import arrow_schema, check_schema
from ludic.store.root import Root

ROW_GROUP_ROWS = 64
"""Groups share a row group up to so many rows; a larger one has its own. 3 ms to read one group, 12 ms at 512 rows."""
ROW_GROUP_BYTES = 64 << 20
"""And up to so many bytes in memory, so that long rollouts are read in bounded pieces."""

# Statistics only on what prunes: each row group costs some 4 kB of footer at 44 leaf columns.
_STATISTICS = ["group_id", "policy_version", "env_name"]
_NUMBER_LISTS = [
    f"{name}.list.element" for name in ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards")
]


def encode(table: pa.Table) -> bytes:
    """Parquet bytes of a rollouts table whose groups are contiguous; no group is split between row groups."""
    assert table.num_rows, "a file without rows"
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, **_writer_options(table.schema)) as writer:
        for start, stop in _row_group_bounds(table):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)
    return sink.getvalue()


def encode_plain(table: pa.Table) -> bytes:
    """Parquet bytes of a small table, such as the ledger of a step."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=1)
    return sink.getvalue()


def _writer_options(schema: pa.Schema) -> dict:
    """zstd level 1; token ids and logprobs as byte streams, 5.4 bytes a token together (benchmarks/store_size.py)."""
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [leaf for leaf in _leaves(schema) if leaf not in _NUMBER_LISTS],
        "column_encoding": dict.fromkeys(_NUMBER_LISTS, "BYTE_STREAM_SPLIT"),
        "write_statistics": _STATISTICS,
    }


@functools.cache
def _leaves(schema: pa.Schema) -> list[str]:
    """Parquet's paths of the columns, nested ones too; only a file can tell them."""
    sink = io.BytesIO()
    pq.write_table(schema.empty_table(), sink)
    parquet = pq.ParquetFile(sink).schema
    return [parquet.column(index).path for index in range(len(parquet))]


def _row_group_bounds(table: pa.Table) -> list[tuple[int, int]]:
    """[start, stop) of each row group."""
    starts = np.append(group_starts(table), table.num_rows)
    bytes_a_row = table.nbytes / table.num_rows
    most = max(1, min(ROW_GROUP_ROWS, int(ROW_GROUP_BYTES / max(bytes_a_row, 1))))
    bounds, start = [], 0
    for stop, after in zip(starts[1:], [*starts[2:], None], strict=True):
        if after is None or after - start > most:
            bounds.append((int(start), int(stop)))
            start = stop
    return bounds


def group_starts(table: pa.Table) -> np.ndarray:
    """(num_groups,) int64: the first row of each run of equal group_ids."""
    ids = table.column("group_id").to_numpy()
    return np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, dtype=np.int64)


@contextmanager
def open_parquet(root: Root, name: str) -> Iterator[pq.ParquetFile]:
    """A rollouts file whose schema is checked; what fails while it is read is explained.

    Raises SchemaError for a broken or a foreign file, FileNotFoundError for none, StoreError
    when the filesystem fails: those two may pass, a broken file never mends.
    """
    with root.explained(name), root.open_file(name) as source:
        try:
            with pq.ParquetFile(source, pre_buffer=True) as file:
                check_schema(file.schema_arrow, "rollouts", f"{root.url}/{name}")
                yield file
        except (LudicError, FileNotFoundError):
            raise
        except (pa.ArrowException, OSError) as error:
            raise _why_unreadable(root, name, error) from error


def _why_unreadable(root: Root, name: str, error: Exception) -> LudicError:
    """A broken file and a broken network raise alike in pyarrow: reading all of it from memory tells them apart."""
    data = root.read(name)
    try:
        pq.ParquetFile(io.BytesIO(data)).read()
    except (pa.ArrowException, OSError):
        return SchemaError(
            f"{root.url}/{name}: no Parquet file, or a broken one, of {len(data)} bytes ({_line(error)}); "
            f"it is set aside; `ludic verify {root.url}` lists all such files"
        )
    return StoreError(f"{root.url}/{name}: {type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def read_rows(root: Root, name: str, addresses: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
    """Columns of single rows, in the order of their addresses (row group, row in it); reads those row groups only.

    Files of an older schema give nulls for what they lack.
    """
    row_groups = sorted({row_group for row_group, _ in addresses})
    with open_parquet(root, name) as file:
        starts = np.cumsum([0, *row_counts(file)[row_groups]])
        table = read_row_groups(file, row_groups, columns, f"{root.url}/{name}")
    start_of = dict(zip(row_groups, starts.tolist(), strict=False))
    return table.take([start_of[row_group] + row for row_group, row in addresses])


def read_columns(root: Root, name: str, columns: Sequence[str]) -> pa.Table:
    """Columns of a whole file; nulls for what a file of an older schema lacks."""
    with open_parquet(root, name) as file:
        return read_row_groups(file, range(file.num_row_groups), columns, f"{root.url}/{name}")


def row_counts(file: pq.ParquetFile) -> np.ndarray:
    """(num_row_groups,) int64: rows of each row group."""
    metadata = file.metadata
    return np.array([metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)], dtype=np.int64)


def read_row_groups(file: pq.ParquetFile, row_groups: Iterable[int], columns: Sequence[str], where: str) -> pa.Table:
    """Columns in the order asked for, and in exactly the types of the schema, whoever wrote the file.

    Nulls for what a file of an older schema lacks. Raises SchemaError, naming `where`, for a null that is not allowed.
    """
    there = [column for column in columns if column in file.schema_arrow.names]
    table = file.read_row_groups(list(row_groups), columns=there, use_threads=False)
    schema = pa.schema([arrow_schema("rollouts").field(column) for column in columns])
    return pa.Table.from_arrays([_fit(table, field, where) for field in schema], schema=schema)


def _fit(table: pa.Table, field: pa.Field, where: str) -> pa.ChunkedArray:
    if field.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(field.name)
    if column.null_count and not field.nullable:
        raise SchemaError(f"{where}: column {field.name!r} has {column.null_count} nulls, wanted none")
    return column.cast(field.type)
