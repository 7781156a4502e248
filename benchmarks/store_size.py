"""Measure bytes per response token, and speed on one core, of ludic's Parquet and of other formats.

    python -m benchmarks.store_size

Writing starts from a worker's data in memory: records for Parquet and Arrow IPC, whose conversion is timed (and for
Parquet validation); dicts of lists, arrays or bytes for the other formats, prepared untimed. Reading starts from a file
with all columns and ends with each rollout's tokens, logprobs and token rewards as NumPy arrays, as a trainer needs
them. All formats hold the same rows, in which an answer's text occurs once (schema 1.1).
"""

import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import in_a_process, median_ratio, print_table, take_turns, with_spread
from benchmarks.rollouts import Source, make_batch
from ludic.records import RolloutBatch, array_columns, column_values, new_id, to_table, validate
from ludic.root.rows import RolloutFile, encode, read_rows
from ludic.root.storage import Content
from ludic.run import RunConfig, put_run
from ludic.settings import run_script

COLUMNS = {"response_tokens": np.int32, "response_logprobs": np.float32, "token_rewards": np.float32}
"""Columns that are read, with their dtypes."""
SIZED = ("response_tokens", "response_logprobs")
"""Columns whose bytes are reported separately."""
FLUSH_GROUPS = 32
"""Groups of 8 rollouts that RolloutWriter writes as one file, and one row group, by default."""
ENCODING = "Parquet (ludic), encoding alone"
_CALLS = 7
_ROUNDS = 7
CALL_GROUPS = 8
"""Groups that a worker writes as one file by default, since it flushes after each engine call."""
Rows = list[dict[str, Any]]
Arrays = list[list[np.ndarray]]
"""For each of COLUMNS, one array per rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of a batch."""

    write: Callable[[], Content]
    """Writes all columns."""
    read: Callable[[bytes], Arrays]
    """Reads COLUMNS from the result of `write`."""
    num_token_bytes: int
    """Bytes of the columns SIZED."""


def main(quick: bool = False) -> None:
    """Print three tables.

    Args:
        quick: Use a small batch and one round, to check that the benchmark works.
    """
    mean_length, num_groups = (50, 2) if quick else (1000, FLUSH_GROUPS)
    batch = make_batch(num_groups, mean_length=mean_length)
    print_sizes(all_formats(batch), num_tokens := num_response_tokens(batch))
    print_speeds(num_groups, mean_length, num_tokens, rounds=1 if quick else _ROUNDS)
    sources: tuple[Source, ...] = ("zipf",) if quick else ("zipf", "python")
    print_parts({(s, n): make_batch(n, mean_length=mean_length, source=s) for s in sources for n in flushes(quick)})


def flushes(quick: bool) -> tuple[int, ...]:
    """Return the numbers of groups in a file to measure."""
    return (2,) if quick else (CALL_GROUPS, FLUSH_GROUPS)


def print_parts(batches: Mapping[tuple[Source, int], RolloutBatch]) -> None:
    """Print ludic's bytes per part. "messages add" and "steps add" are the growth of a file with these columns."""
    texts = ["messages", "agent_steps", "environment_steps"]
    rows = []
    for (source, num_groups), batch in batches.items():
        table, num_tokens = to_table(batch, run_id="none", sequence=0), num_response_tokens(batch)
        base, with_messages, _, whole = (len(encode(table.drop_columns(texts[kept:]))) for kept in range(4))
        sizes = [parquet(batch).num_token_bytes, base, with_messages - base, whole - with_messages, whole]
        rows.append([f"{source}, {num_groups} groups of 8", *(f"{size / num_tokens:.2f}" for size in sizes)])
    columns = ["", "tokens and logprobs", "all but texts", "messages add", "steps add", "all columns"]
    print_table("Bytes a response token, ludic's own", columns, rows)


def all_formats(batch: RolloutBatch) -> dict[str, Format]:
    """Return all formats, ludic's first."""
    return {name: make(batch) for name, make in FORMATS.items()}


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


def print_speeds(num_groups: int, mean_length: int, num_tokens: int, rounds: int) -> None:
    """Print medians of rounds with their spread.

    In each round each contestant has a process of its own, so that it does not pay for another's memory.
    """
    writing: dict[str, list[float]] = {name: [] for name in [*FORMATS, ENCODING]}
    reading: dict[str, list[float]] = {name: [] for name in FORMATS}
    for _ in range(rounds):
        for name in writing:
            seconds = in_a_process(measure_speed, name, num_groups, mean_length)
            writing[name].append(seconds["write"])
            if name in reading:
                reading[name].append(seconds["read"])
    ours = next(iter(FORMATS))
    rows = [
        [name, *_speed(writing, name, ours, num_tokens), *_speed(reading, name, ours, num_tokens)] for name in writing
    ]
    columns = ["", "written", "of ludic's", "read", "of ludic's"]
    title = f"Million tokens a second on one core, median of {rounds} rounds (lowest to highest)"
    print_table(title, columns, rows)


def measure_speed(name: str, num_groups: int, mean_length: int) -> dict[str, float]:
    """Return the median seconds of a write and of a read, each right after an untimed call."""
    pa.set_cpu_count(1)
    batch = make_batch(num_groups, mean_length=mean_length)
    if name == ENCODING:
        table = to_table(batch, run_id="none", sequence=0)
        calls: dict[str, Callable[[], object]] = {"write": partial(encode, table)}
    else:
        form = FORMATS[name](batch)
        calls = {"write": form.write, "read": partial(form.read, bytes(form.write()))}
    return {what: median(take_turns({what: call}, _CALLS, twice=True)[what]) for what, call in calls.items()}


def _speed(seconds: Mapping[str, Sequence[float]], name: str, ours: str, num_tokens: int) -> list[str]:
    """Return million tokens per second, the median of rounds with the lowest and highest, and the ratio to ludic's."""
    if name not in seconds:
        return ["", ""]
    return [
        with_spread([num_tokens / taken / 1e6 for taken in seconds[name]]),
        f"{median_ratio(seconds[ours], seconds[name]):.2g}x",
    ]


def num_response_tokens(batch: RolloutBatch) -> int:
    return sum(rollout.response_length for group in batch.groups for rollout in group.rollouts)


def parquet(batch: RolloutBatch) -> Format:
    """Return the format of RolloutWriter and a trainer's rank; the root is in memory, so the disk is not measured."""
    root = put_run(f"memory://{new_id()}", RunConfig(model="none", env=("moar_cats",)))
    name = RolloutFile(7, "moar_cats", batch.metadata.worker_id, 0).name

    def write() -> Content:
        return encode(to_table(batch, run_id=root.run_id, sequence=0, tokens=validate(batch)))

    root.put_if_absent(name, write())
    metadata = pq.ParquetFile(io.BytesIO(root.read(name))).metadata
    row_groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    addresses = [(index, row) for index, row_group in enumerate(row_groups) for row in range(row_group.num_rows)]
    chunks = [row_group.column(leaf) for row_group in row_groups for leaf in range(metadata.num_columns)]
    return Format(
        write=write,
        read=lambda data: _columns(read_rows(root, name, addresses, list(COLUMNS))),
        num_token_bytes=sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in SIZED),
    )


def arrow_ipc(batch: RolloutBatch, compression: str | None) -> Format:
    def write(columns: Sequence[str] | None = None) -> bytes:
        table = to_table(batch, run_id="none", sequence=0)
        table = table.select(list(columns)) if columns else table
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    return Format(
        write=write,
        read=lambda data: _columns(pa.ipc.open_stream(data).read_all()),
        num_token_bytes=len(write(SIZED)),
    )


def pickled_arrays(batch: RolloutBatch) -> Format:
    rows = rows_of_arrays(batch)

    def read(data: bytes) -> Arrays:
        found = pickle.loads(data)  # noqa: S301 - our own bytes; ludic itself never pickles
        return [[row[name] for row in found] for name in COLUMNS]

    return Format(write=lambda: pickle.dumps(rows), read=read, num_token_bytes=len(pickle.dumps(_only_sized(rows))))


def packed_bytes(batch: RolloutBatch) -> Format:
    """Return MessagePack with each list of numbers as raw bytes."""
    rows = [
        {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        for row in rows_of_arrays(batch)
    ]

    def read(data: bytes) -> Arrays:
        found = msgpack.unpackb(data)
        return [[np.frombuffer(row[name], dtype) for row in found] for name, dtype in COLUMNS.items()]

    return Format(write=lambda: pack_rows(rows), read=read, num_token_bytes=len(pack_rows(_only_sized(rows))))


def rows_of_arrays(batch: RolloutBatch) -> Rows:
    table = to_table(batch, run_id="none", sequence=0)
    names = [column.name for column in array_columns().values() if column.is_number_a_token]
    arrays = {name: column_values(table, name) for name in names}
    return [row | {name: arrays[name][index] for name in arrays} for index, row in enumerate(table.to_pylist())]


def of_lists(batch: RolloutBatch, dumps: Callable[[Rows], bytes], loads: Callable[[bytes], Rows]) -> Format:
    rows = to_table(batch, run_id="none", sequence=0).to_pylist()

    def read(data: bytes) -> Arrays:
        found = loads(data)
        return [[np.array(row[name], dtype) for row in found] for name, dtype in COLUMNS.items()]

    return Format(write=lambda: dumps(rows), read=read, num_token_bytes=len(dumps(_only_sized(rows))))


def _columns(table: pa.Table) -> Arrays:
    return [column_values(table, name) for name in COLUMNS]


def _only_sized(rows: Rows) -> Rows:
    return [{name: row[name] for name in SIZED} for row in rows]


def pack_rows(rows: Rows) -> bytes:
    return msgpack.packb(rows, default=str)


def json_lines(rows: Rows) -> bytes:
    return "\n".join(json.dumps(row, default=str) for row in rows).encode()


def parse_lines(data: bytes) -> Rows:
    return [json.loads(line) for line in data.splitlines()]


def compress(data: bytes) -> bytes:
    """Compress with zstd, level 1, as in ludic's files."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def decompress(data: bytes) -> bytes:
    return pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()


FORMATS: dict[str, Callable[[RolloutBatch], Format]] = {
    "Parquet (ludic)": parquet,
    "Arrow IPC": partial(arrow_ipc, compression=None),
    "Arrow IPC, zstd": partial(arrow_ipc, compression="zstd"),
    "pickle of NumPy arrays": pickled_arrays,
    "MessagePack of bytes": packed_bytes,
    "pickle of lists": partial(of_lists, dumps=pickle.dumps, loads=pickle.loads),
    "MessagePack": partial(of_lists, dumps=pack_rows, loads=msgpack.unpackb),
    "MessagePack, zstd": partial(
        of_lists, dumps=lambda rows: compress(pack_rows(rows)), loads=lambda data: msgpack.unpackb(decompress(data))
    ),
    "JSON lines": partial(of_lists, dumps=json_lines, loads=parse_lines),
    "JSON lines, zstd": partial(
        of_lists, dumps=lambda rows: compress(json_lines(rows)), loads=lambda data: parse_lines(decompress(data))
    ),
}
"""Formats by name, ludic's first."""


if __name__ == "__main__":
    run_script(main, description=__doc__)
