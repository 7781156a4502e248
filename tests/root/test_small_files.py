"""Many small files are read in one pass, and exactly those that the reader of single files accepts unchanged."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strategies import make_batch

from ludic.records.conversion import to_table
from ludic.records.tables import VERSION_KEY
from ludic.root.root import Root
from ludic.root.rows import reader as module
from ludic.root.rows.files import RolloutFile
from ludic.root.rows.parquet import encode, encode_plain, read_columns, sound_footer
from ludic.root.rows.reader import read_small_files
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run, to_json

COLUMNS = ["rollout_id", "group_id", "created_at", "policy_version", "top_p", "episode_reward", "truncated", "error"]
NUM_FILES = 12

on_one_filesystem = pytest.mark.parametrize("root_url", ["memory"], indirect=True)


def make_table(number: int, num_groups: int = 2) -> pa.Table:
    batch = make_batch(worker_id="w0-a", num_groups=num_groups, group_size=2, seed=number)
    return to_table(batch, run_id="a-run", sequence=number)


def file_of(number: int) -> RolloutFile:
    return RolloutFile(number // 4, ("moar_cats", "a/b c")[number % 2], "w0-a", number)


@pytest.fixture
def files(root: Root) -> list[RolloutFile]:
    """Files of 2, 4 or 6 rows."""
    for number in range(NUM_FILES):
        root.put(file_of(number).name, encode(make_table(number, 1 + number % 3)))
    return [file_of(number) for number in range(NUM_FILES)]


def read_names(root: Root, files: list[RolloutFile]) -> list[str]:
    """Names of the files that were read, after a comparison with reads of single files."""
    names = []
    for small in read_small_files(root, files, COLUMNS):
        assert small.table.num_rows == small.row_counts.sum()
        starts = small.row_counts.cumsum() - small.row_counts
        for file, start, count in zip(small.files, starts, small.row_counts, strict=True):
            assert small.table.slice(start, count).equals(read_columns(root, file.name, COLUMNS))
            names.append(file.name)
    return names


def test_one_pass_reads_the_same_rows_as_a_read_of_each_file(root: Root, files: list[RolloutFile], monkeypatch) -> None:
    assert read_names(root, files) == [file.name for file in files]
    assert len(list(read_small_files(root, files, COLUMNS))) == 1
    for name in ("_LOCAL", "_REMOTE"):
        monkeypatch.setattr(module, name, (1, 5))
    assert [len(small.files) for small in read_small_files(root, files, COLUMNS)] == [5, 5, 2]
    monkeypatch.setattr(module, "_BATCH_BYTES", 1)
    assert [len(small.files) for small in read_small_files(root, files, COLUMNS)] == [1] * NUM_FILES
    assert read_names(root, files) == [file.name for file in files]
    assert list(read_small_files(root, [], COLUMNS)) == []


def without_digests(data: bytes) -> bytes:
    table = pq.read_table(pa.BufferReader(data))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, store_schema=False)
    return sink.getvalue().to_pybytes()


def two_row_groups(data: bytes) -> bytes:
    return encode_plain(pq.read_table(pa.BufferReader(data)), row_group_size=1, store_schema=False)


def newer_schema(data: bytes) -> bytes:
    table = pq.read_table(pa.BufferReader(data))
    return encode(table.replace_schema_metadata({**table.schema.metadata, VERSION_KEY: b"2.1"}))


def with_a_null(data: bytes) -> bytes:
    """A file of a schema with only nullable columns, one of which has a null that ludic's schema forbids."""
    table = pq.read_table(pa.BufferReader(data))
    index = table.schema.get_field_index("group_id")
    field = table.schema.field(index).with_nullable(True)
    return encode(table.set_column(index, field, pa.array([None] * table.num_rows, pa.string())))


def flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


CHANGES: list[Callable[[bytes], bytes]] = [
    *(without_digests, two_row_groups, newer_schema, with_a_null, flipped, lambda data: data[:-9], lambda _: b""),
]


def test_files_that_need_a_closer_look_are_left_out_alone(root: Root, files: list[RolloutFile]) -> None:
    # The first, the middle and the last file show the schemas.
    odd = [files[index].name for index in (1, 2, 3, 4, 5, 7, 8)]
    sound = [file.name for file in files if file.name not in odd]
    for name, change in zip(odd, CHANGES, strict=True):
        root.put(name, change(root.read(name)))
    assert read_names(root, files) == sound
    for name in odd:
        root.delete(name)
    assert read_names(root, files) == sound


@on_one_filesystem
def test_a_large_file_is_left_out(root: Root, files: list[RolloutFile], monkeypatch) -> None:
    largest = max(files, key=lambda file: len(root.read(file.name)))
    monkeypatch.setattr(module, "_LARGEST_BYTES", len(root.read(largest.name)) - 1)
    found = read_names(root, files)
    assert largest.name not in found
    assert found


@on_one_filesystem
def test_no_large_file_is_read_whole_to_learn_the_schemas(root: Root, files: list[RolloutFile], monkeypatch) -> None:
    num_bytes = []

    def note(data: bytes) -> bytes | None:
        num_bytes.append(len(data))
        return sound_footer(data)

    monkeypatch.setattr(module, "sound_footer", note)
    limit = sorted(len(root.read(file.name)) for file in files)[NUM_FILES // 2]
    monkeypatch.setattr(module, "_LARGEST_BYTES", limit)
    assert read_names(root, files)
    assert 0 < max(num_bytes) <= limit


def test_columns_that_an_older_file_lacks_are_null(tmp_path: Path) -> None:
    root = put_run(str(tmp_path), RunConfig(model="m", env=("moar_cats",), extra_columns={"x_judge": "string"}))
    newer = make_table(1).append_column(pa.field("x_judge", pa.string()), pa.array(["a", None, "b", "c"]))
    for number, table in enumerate([make_table(0).drop_columns(["finish_reason"]), newer]):
        root.put(file_of(number).name, encode(table))
    # The first, the middle and the last file show the schemas.
    (small,) = read_small_files(root, [file_of(0), file_of(1), file_of(1)], ["finish_reason", "x_judge"])
    assert small.table.column("finish_reason").to_pylist()[:4] == [None] * 4
    assert small.table.column("x_judge").to_pylist() == [None] * 4 + ["a", None, "b", "c"] * 2
    unknown = dataclasses.replace(root, run_json=to_json(RunConfig(model="m", env=("moar_cats",)), root.run_id))
    assert len(list(read_small_files(unknown, [file_of(1)], COLUMNS))) == 1


def test_a_footer_is_given_only_if_each_byte_matches_its_digest() -> None:
    data = encode(make_table(0))
    size = int.from_bytes(data[-8:-4], "little") + 8
    assert sound_footer(data) == data[-size:]
    for index in range(0, len(data), 37):
        assert sound_footer(data[:index] + bytes([data[index] ^ 4]) + data[index + 1 :]) is None, index
    for length in range(0, len(data), 1001):
        assert sound_footer(data[:length]) is None
