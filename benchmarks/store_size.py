"""Bytes a response token, and speed on one core: ludic's Parquet against other ways to keep the same rollouts.

    python -m benchmarks.store_size

Writing starts from what a worker has in memory: records for Parquet and Arrow IPC, converted on the clock (and for
Parquet validated); dicts of lists or arrays, ready made off the clock, for the others. Reading starts from a file with
all columns and ends with each rollout's tokens and logprobs as NumPy arrays, which is what a trainer wants of it.
"""

import io
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from benchmarks.measure import median_ratio, print_table, take_turns
from benchmarks.rollouts import make_batch
from ludic.records import RolloutBatch, new_id
from ludic.schema import TOKEN_COLUMNS, column_values, to_table, validate
from ludic.store import RolloutFile, Root, RunConfig, read_rows
from ludic.store.parquet import encode

COLUMNS = {"response_tokens": np.int32, "response_logprobs": np.float32}
"""What is read, and as what."""
Rows = list[dict[str, Any]]
Arrays = list[list[np.ndarray]]
"""For each of COLUMNS, one array a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A way to keep a batch."""

    write: Callable[[], bytes]
    """All columns."""
    read: Callable[[bytes], Arrays]
    """COLUMNS, out of what `write` gave."""
    num_token_bytes: int
    """That COLUMNS alone take."""


def main(quick: bool = False) -> None:
    """Print two tables.

    Args:
        quick: A small batch, once, to see that all works.
    """
    pa.set_cpu_count(1)
    batch = make_batch(2 if quick else 8, mean_length=50 if quick else 1000)
    formats = all_formats(batch)
    print_sizes(formats, num_tokens := num_response_tokens(batch))
    print_speeds(formats, num_tokens, rounds=1 if quick else 15)


def all_formats(batch: RolloutBatch) -> dict[str, Format]:
    """ludic's first."""
    return {
        "Parquet (ludic)": parquet(batch),
        "Arrow IPC": arrow_ipc(batch, None),
        "Arrow IPC, zstd": arrow_ipc(batch, "zstd"),
        "pickle of NumPy arrays": pickled_arrays(batch),
        "pickle of lists": of_lists(batch, pickle.dumps, pickle.loads),
        "MessagePack": of_lists(batch, pack_rows, msgpack.unpackb),
        "MessagePack, zstd": of_lists(
            batch, lambda r: compress(pack_rows(r)), lambda d: msgpack.unpackb(decompress(d))
        ),
        "JSON lines": of_lists(batch, json_lines, parse_lines),
        "JSON lines, zstd": of_lists(batch, lambda r: compress(json_lines(r)), lambda d: parse_lines(decompress(d))),
    }


def print_sizes(formats: dict[str, Format], num_tokens: int) -> None:
    ours = next(iter(formats.values()))
    our_size = len(ours.write())
    rows = []
    for name, form in formats.items():
        size, alone = len(form.write()), form.num_token_bytes
        ratios = [f"{size / our_size:.2f}x", f"{alone / ours.num_token_bytes:.2f}x"]
        rows.append([name, f"{size / num_tokens:.1f}", ratios[0], f"{alone / num_tokens:.1f}", ratios[1]])
    columns = ["", "all columns", "of ludic's", "tokens and logprobs", "of ludic's"]
    print_table(f"Bytes a response token, of {num_tokens:,}", columns, rows)


def print_speeds(formats: dict[str, Format], num_tokens: int, rounds: int) -> None:
    files = {name: form.write() for name, form in formats.items()}
    writing = take_turns({name: form.write for name, form in formats.items()}, rounds)
    reading = take_turns({name: partial(form.read, files[name]) for name, form in formats.items()}, rounds)
    ours = next(iter(formats))
    rows = []
    for name in formats:
        row = [name]
        for seconds in (writing, reading):
            row.append(f"{num_tokens / median(seconds[name]) / 1e6:.1f}")
            row.append(f"{median_ratio(seconds[ours], seconds[name]):.2g}x")
        rows.append(row)
    columns = ["", "written", "of ludic's", "read", "of ludic's"]
    print_table("Million tokens a second on one core", columns, rows)


def num_response_tokens(batch: RolloutBatch) -> int:
    return sum(rollout.response_length for group in batch.groups for rollout in group.rollouts)


def parquet(batch: RolloutBatch) -> Format:
    """As RolloutWriter writes and a trainer's rank reads; the root is in memory, so that no disk is measured."""
    root = Root.create(f"memory://{new_id()}", RunConfig(model="none", env=("moar_cats",)))
    name = RolloutFile(7, "moar_cats", batch.metadata.worker_id, 0).name

    def write() -> bytes:
        validate(batch)
        return encode(to_table(batch, run_id=root.run_id, sequence=0))

    root.put_if_absent(name, write())
    metadata = pq.ParquetFile(io.BytesIO(root.read(name))).metadata
    row_groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    addresses = [(index, row) for index, row_group in enumerate(row_groups) for row in range(row_group.num_rows)]
    chunks = [row_group.column(leaf) for row_group in row_groups for leaf in range(metadata.num_columns)]
    return Format(
        write=write,
        read=lambda data: _columns(read_rows(root, name, addresses, list(COLUMNS))),
        num_token_bytes=sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in COLUMNS),
    )


def arrow_ipc(batch: RolloutBatch, compression: str | None) -> Format:
    def write(columns: Sequence[str] | None = None) -> bytes:
        table = to_table(batch, run_id="none", sequence=0)
        table = table.select(columns) if columns else table
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    return Format(
        write=write,
        read=lambda data: _columns(pa.ipc.open_stream(data).read_all()),
        num_token_bytes=len(write(list(COLUMNS))),
    )


def pickled_arrays(batch: RolloutBatch) -> Format:
    table = to_table(batch, run_id="none", sequence=0)
    arrays = {name: column_values(table, name) for name in TOKEN_COLUMNS}
    rows = [row | {name: arrays[name][place] for name in arrays} for place, row in enumerate(table.to_pylist())]

    def read(data: bytes) -> Arrays:
        found = pickle.loads(data)  # noqa: S301 - our own bytes; ludic itself never pickles
        return [[row[name] for row in found] for name in COLUMNS]

    return Format(
        write=lambda: pickle.dumps(rows),
        read=read,
        num_token_bytes=len(pickle.dumps(_only_tokens(rows))),
    )


def of_lists(batch: RolloutBatch, dumps: Callable[[Rows], bytes], loads: Callable[[bytes], Rows]) -> Format:
    rows = to_table(batch, run_id="none", sequence=0).to_pylist()

    def read(data: bytes) -> Arrays:
        found = loads(data)
        return [[np.array(row[name], dtype) for row in found] for name, dtype in COLUMNS.items()]

    return Format(write=lambda: dumps(rows), read=read, num_token_bytes=len(dumps(_only_tokens(rows))))


def _columns(table: pa.Table) -> Arrays:
    return [column_values(table, name) for name in COLUMNS]


def _only_tokens(rows: Rows) -> Rows:
    return [{name: row[name] for name in COLUMNS} for row in rows]


def pack_rows(rows: Rows) -> bytes:
    return msgpack.packb(rows, default=str)


def json_lines(rows: Rows) -> bytes:
    return "\n".join(json.dumps(row, default=str) for row in rows).encode()


def parse_lines(data: bytes) -> Rows:
    return [json.loads(line) for line in data.splitlines()]


def compress(data: bytes) -> bytes:
    """zstd, level 1, as in ludic's files."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def decompress(data: bytes) -> bytes:
    return pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
