"""Rollout files: their names, and how a table becomes Parquet bytes and comes back.

{folder}/version={policy_version}/env={env_name, percent-encoded}/{worker_id}-{sequence}.parquet
"""

import functools
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import ConfigError, SchemaError
from ludic.schema import arrow_schema, check_schema
from ludic.store.root import Root

Folder = Literal["rollouts", "evals"]

ROW_GROUP_ROWS = 64
"""A row group closes at the first group boundary after so many rows: 3 ms to read one group, 12 ms at 512 rows."""
ROW_GROUP_BYTES = 64 << 20
"""Or after so many bytes in memory, so that long rollouts are read in bounded pieces."""

# Statistics only on what prunes: each row group costs some 4 kB of footer at 44 leaf columns.
_STATISTICS = ["group_id", "policy_version", "env_name"]
_NUMBER_LISTS = [
    f"{name}.list.element" for name in ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards")
]
_NAME = re.compile(r"(?:rollouts|evals)/version=(\d+)/env=([^/]+)/([^/]+)-(\d+)\.parquet")
_WORKER_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True, slots=True, order=True)
class RolloutFile:
    """A file of rollouts, known by its name alone."""

    version: int
    env_name: str
    worker_id: str
    sequence: int
    folder: Folder = "rollouts"

    @property
    def name(self) -> str:
        """Path below the root."""
        env = quote(self.env_name, safe="")
        return f"{self.folder}/version={self.version}/env={env}/{self.worker_id}-{self.sequence}.parquet"

    @classmethod
    def parse(cls, name: str) -> "RolloutFile | None":
        """None for a name that no worker writes."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        version, env, worker_id, sequence = match.groups()
        folder: Folder = "evals" if name.startswith("evals/") else "rollouts"
        return cls(int(version), unquote(env), worker_id, int(sequence), folder)


def check_worker_id(worker_id: str) -> str:
    """Raises ConfigError for an id that would not be safe in a file name."""
    if not _WORKER_ID.fullmatch(worker_id) or worker_id.startswith("."):
        raise ConfigError(
            f"worker_id {worker_id!r} is no file name; wanted letters, digits, '.', '_' and '-', at most 200"
        )
    return worker_id


def list_files(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[RolloutFile]:
    """Rollout files in a range of versions, or all of them; other partitions are not listed."""
    if versions is None:
        names = root.list(folder)
    else:
        names = [name for version in versions for name in root.list(f"{folder}/version={version}")]
    return sorted(file for file in map(RolloutFile.parse, names) if file is not None)


def encode(table: pa.Table) -> bytes:
    """Parquet bytes of a rollouts table whose groups are contiguous; no group is split between row groups."""
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
    """zstd level 1; token ids and logprobs as byte streams, 5.2 bytes a token together (benchmarks/store_size.py)."""
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
    """[start, stop) of each row group; an empty table has one empty row group."""
    starts = np.append(group_starts(table), table.num_rows)
    bytes_a_row = table.nbytes / max(table.num_rows, 1)
    most = max(1, min(ROW_GROUP_ROWS, int(ROW_GROUP_BYTES / max(bytes_a_row, 1))))
    bounds, start = [], 0
    for stop, after in zip(starts[1:], [*starts[2:], None], strict=True):
        if after is None or after - start > most:
            bounds.append((int(start), int(stop)))
            start = stop
    return bounds or [(0, 0)]


def group_starts(table: pa.Table) -> np.ndarray:
    """(num_groups,) int64: the first row of each run of equal group_ids."""
    ids = table.column("group_id").to_numpy()
    return np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, dtype=np.int64)


def open_parquet(root: Root, name: str) -> pq.ParquetFile:
    """A rollouts file whose schema is checked.

    Raises SchemaError for a broken or a foreign file, FileNotFoundError for none, StoreError
    when the filesystem fails: those two may pass, a broken file never mends.
    """
    with root.explained(name):
        source = root.fs.open(root.at(name), "rb")
    try:
        file = pq.ParquetFile(source, pre_buffer=True)
    except (pa.ArrowException, OSError) as error:
        source.close()
        raise _why_unreadable(root, name, error) from error
    check_schema(file.schema_arrow, "rollouts", f"{root.url}/{name}")
    return file


def _why_unreadable(root: Root, name: str, error: Exception) -> Exception:
    """A truncated file and a broken network raise alike in pyarrow: reading the whole file tells them apart."""
    data = root.read(name)
    try:
        pq.ParquetFile(io.BytesIO(data))
    except (pa.ArrowException, OSError):
        return SchemaError(
            f"{root.url}/{name}: no Parquet file, or a truncated one of {len(data)} bytes ({_line(error)}); "
            f"it is set aside; `ludic verify {root.url}` lists all such files"
        )
    return error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def read_rows(root: Root, name: str, addresses: Sequence[tuple[int, int]], columns: list[str]) -> pa.Table:
    """Columns of single rows, in the order of their addresses (row group, row in it); reads those row groups only.

    Files of an older schema give nulls for what they lack.
    """
    row_groups = sorted({row_group for row_group, _ in addresses})
    with open_parquet(root, name) as file:
        starts = np.cumsum([0, *(file.metadata.row_group(group).num_rows for group in row_groups)])
        start_of = dict(zip(row_groups, starts.tolist(), strict=False))
        table = _read(file, row_groups, columns)
    return table.take([start_of[row_group] + row for row_group, row in addresses])


def read_columns(root: Root, name: str, columns: list[str]) -> pa.Table:
    """Columns of a whole file; nulls for what a file of an older schema lacks."""
    with open_parquet(root, name) as file:
        return _read(file, range(file.num_row_groups), columns)


def _read(file: pq.ParquetFile, row_groups: Iterable[int], columns: list[str]) -> pa.Table:
    there = [column for column in columns if column in file.schema_arrow.names]
    table = file.read_row_groups(list(row_groups), columns=there, use_threads=False)
    for column in set(columns) - set(there):
        field = arrow_schema("rollouts").field(column)
        table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(columns)
