import io
import json
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from filesystems import UnreliableFileSystem
from fsspec import AbstractFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import make_batch

from ludic.errors import SchemaError, StoreError
from ludic.records.conversion import to_table
from ludic.records.tables import arrow_schema
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, list_files
from ludic.root.rows.parquet import encode, read_columns, read_rows
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

on_one_filesystem = pytest.mark.parametrize("root_url", ["memory"], indirect=True)
"""For tests of what the reader makes of what it read; the others here read from every filesystem."""

here_and_elsewhere = pytest.mark.parametrize("root_url", ["local", "s3"], indirect=True)
"""For tests of many reads at once, of which a local root gets other numbers."""

EMPTY = Cursor().to_dict()


def reader_of(root, cursor=None) -> RolloutReader:
    return RolloutReader(root, ["rollout_id", "episode_reward"], cursor)


def ids(rows: pa.Table | None) -> list[str]:
    """group_ids in order, each once."""
    return [] if rows is None else list(dict.fromkeys(rows.column("group_id").to_pylist()))


def of_groups(rows: pa.Table, group_ids) -> pa.Table:
    return rows.filter(pc.is_in(rows.column("group_id"), value_set=pa.array(list(group_ids), pa.string())))


def through_json(cursor: Cursor) -> Cursor:
    return Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))


# --- Once ---------------------------------------------------------------------------------------------------


def test_each_group_is_delivered_once(root, put_file):
    first = put_file(root, "w0", 0)
    reader = reader_of(root)
    assert ids(reader.poll(None)) == first
    assert reader.poll(None) is None
    second = [*put_file(root, "w0", 1), *put_file(root, "w1", 0)]
    assert sorted(ids(reader.poll(None))) == sorted(second)
    assert reader.poll(None) is None


def test_rows_come_with_the_columns_asked_for_and_their_address(root, next_batch):
    batch = next_batch(num_groups=160, response_length=1)
    with RolloutWriter(root, "w0", flush_groups=160) as writer:
        writer.append(batch)
    rows = reader_of(root).poll(None)
    assert rows.column_names == [
        *("rollout_id", "episode_reward", "run_id", "worker_id", "sequence", "group_id", "request_index"),
        *("group_size", "created_at", "file", "row_group", "row", "arrival", "refusal"),
    ]
    # 320 rows of groups of 2: row groups of 256 and 64.
    assert rows.column("row_group").to_pylist() == [0] * 256 + [1] * 64
    assert rows.column("row").to_pylist() == [*range(256), *range(64)]
    assert set(rows.column("file").to_pylist()) == {"rollouts/version=0/env=moar_cats/w0-0.parquet"}
    table = read_rows(root, rows.column("file")[262].as_py(), [(1, 6)], ["rollout_id"])
    assert table.column(0).to_pylist() == [rows.column("rollout_id")[262].as_py()]


@on_one_filesystem
def test_arrival_counts_files_as_they_were_read(root, put_file):
    reader = reader_of(root)
    put_file(root, "w1", 0)
    assert set(reader.poll(None).column("arrival").to_pylist()) == {0}
    put_file(root, "w0", 0)
    put_file(root, "w2", 0)
    assert set(reader.poll(None).column("arrival").to_pylist()) == {1, 2}


@on_one_filesystem
def test_a_new_reader_without_a_cursor_sees_everything_again(root, put_file):
    groups = put_file(root)
    assert ids(reader_of(root).poll(None)) == groups
    assert ids(reader_of(root).poll(None)) == groups


# --- The cursor ---------------------------------------------------------------------------------------------


@on_one_filesystem
def test_what_was_read_but_not_consumed_comes_again_after_a_crash(root, put_file):
    groups = put_file(root)
    reader = reader_of(root)
    reader.poll(None)
    assert ids(reader_of(root, through_json(reader.cursor)).poll(None)) == groups


@on_one_filesystem
def test_what_was_consumed_never_comes_again(root, put_file):
    put_file(root, "w0", 0)
    reader = reader_of(root)
    reader.consume(reader.poll(None))
    resumed = reader_of(root, through_json(reader.cursor))
    assert resumed.poll(None) is None
    later = put_file(root, "w0", 1)
    assert ids(resumed.poll(None)) == later


@on_one_filesystem
@pytest.mark.parametrize("num_consumed", [0, 1, 2, 3, 4, 5])
def test_a_half_used_file_is_resumed_at_any_point(root, put_file, num_consumed):
    groups = put_file(root, "w0", 0, num_groups=5)
    reader = reader_of(root)
    rows = reader.poll(None)
    # From the end, and one at a time: the order of use is not that of the file.
    for group_id in groups[5 - num_consumed :]:
        reader.consume(of_groups(rows, [group_id]))
    resumed = reader_of(root, through_json(reader.cursor))
    rest = resumed.poll(None)
    assert ids(rest) == groups[: 5 - num_consumed]
    if rest is not None:
        resumed.consume(rest)
    assert reader_of(root, through_json(resumed.cursor)).poll(None) is None
    assert resumed.cursor.to_dict() == {**EMPTY, "files": {"w0": [(0, 1)]}}


@on_one_filesystem
def test_groups_of_several_files_are_consumed_at_once(root, put_file):
    first, second = put_file(root, "w0", 0), put_file(root, "w1", 0)
    reader = reader_of(root)
    rows = reader.poll(None)
    reader.consume(of_groups(rows, [*first, second[0]]))
    assert ids(reader_of(root, through_json(reader.cursor)).poll(None)) == [second[1]]


# --- What is listed when ------------------------------------------------------------------------------------


@on_one_filesystem
def test_files_that_appear_out_of_order_are_all_delivered(root, put_file):
    reader = reader_of(root)
    for sequence in (4, 1, 0, 3, 2):
        groups = put_file(root, "w0", sequence)
        rows = reader.poll(None)
        assert ids(rows) == groups
        reader.consume(rows)
    assert reader.cursor.to_dict()["files"] == {"w0": [(0, 5)]}


@on_one_filesystem
def test_a_gap_is_looked_at_again_after_a_restart(root, put_file):
    put_file(root, "w0", 0)
    put_file(root, "w0", 2)
    reader = reader_of(root)
    reader.consume(reader.poll(None))
    resumed = reader_of(root, through_json(reader.cursor))
    assert resumed.poll(None) is None
    late = put_file(root, "w0", 1)
    assert ids(resumed.poll(None)) == late


@on_one_filesystem
def test_only_versions_in_the_window_are_delivered(root, put_file):
    groups = {version: put_file(root, "w0", version, version=version) for version in (0, 1, 2, 10)}
    reader = reader_of(root)
    assert ids(reader.poll(range(1, 3))) == [*groups[1], *groups[2]]
    assert reader.poll(range(1, 3)) is None
    assert ids(reader.poll(range(2, 11))) == groups[10]
    assert ids(reader.poll(None)) == groups[0]


@on_one_filesystem
def test_evaluations_are_not_delivered(root, next_batch):
    with RolloutWriter(root, "w0", folder="evals") as writer:
        writer.append(next_batch())
    assert reader_of(root).poll(None) is None


# --- What cannot be read ------------------------------------------------------------------------------------

NAME = RolloutFile(0, "moar_cats", "bad", 0).name


def a_file(**options) -> bytes:
    return bytes(encode(to_table(make_batch(worker_id="bad", **options), run_id="run", sequence=0)))


def corrupt(data: bytes) -> bytes:
    """The footer is sound, the pages are not."""
    return data[:4] + bytes(len(data[4:-20_000])) + data[-20_000:]


def parquet_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def without_group_id() -> bytes:
    return parquet_of(to_table(make_batch(), run_id="run", sequence=0).drop_columns(["group_id"]))


def with_null_group_id() -> bytes:
    table = to_table(make_batch(), run_id="run", sequence=0)
    nulls = pa.nulls(table.num_rows, pa.string())
    return parquet_of(
        table.set_column(table.schema.get_field_index("group_id"), pa.field("group_id", pa.string()), nulls)
    )


def of_version(version: bytes) -> bytes:
    table = to_table(make_batch(), run_id="run", sequence=0)
    return parquet_of(table.replace_schema_metadata({**table.schema.metadata, b"ludic.schema_version": version}))


BROKEN = [
    (lambda: b"", "not a Parquet file, or a broken one, of 0 bytes"),
    (lambda: b"PAR1", "not a Parquet file, or a broken one, of 4 bytes"),
    (lambda: b"this is some text, and not short", "not a Parquet file, or a broken one, of 32 bytes"),
    (lambda: a_file()[:-1], "not a Parquet file, or a broken one"),
    (lambda: a_file()[: len(a_file()) // 2], "not a Parquet file, or a broken one"),
    (lambda: corrupt(a_file(response_length=2000)), "on do not match their digest"),
    (lambda: parquet_of(pa.table({"x": [1]})), "no ludic.table in its metadata"),
    (lambda: of_version(b"2.0"), "rollouts schema 2.0 is newer than this ludic"),
    (without_group_id, "column 'group_id' is missing"),
    (with_null_group_id, "column 'group_id' has 8 nulls, wanted none"),
    (lambda: parquet_of(arrow_schema("rollouts").empty_table()), "holds no rows"),
]


def test_files_that_cannot_be_read_are_quarantined_each_with_its_reason(root, put_file):
    before = put_file(root, "a", 0)
    reasons = {RolloutFile(0, "moar_cats", "bad", number).name: reason for number, (_, reason) in enumerate(BROKEN)}
    for name, (make, _) in zip(reasons, BROKEN, strict=True):
        root.put(name, make())
    after = put_file(root, "z", 0)
    reader = reader_of(root)
    assert ids(reader.poll(None)) == [*before, *after]
    assert sorted(reader.broken_files) == sorted(reasons)
    for name, reason in reasons.items():
        assert reader.broken_files[name].startswith(f"{root.url}/{name}")
        assert reason in reader.broken_files[name]
    later = put_file(root, "z", 1)
    assert ids(reader.poll(None)) == later


def test_files_with_other_names_are_not_ours(root, put_file):
    for name in ("notes.txt", "w0.parquet", "w0-0.parquet.tmp"):
        root.put(f"rollouts/version=0/{name}", b"whatever")
    groups = put_file(root)
    reader = reader_of(root)
    assert ids(reader.poll(None)) == groups
    assert reader.broken_files == {}
    assert [file.worker_id for file in list_files(root)] == ["w0"]


@on_one_filesystem
def test_columns_that_an_older_file_lacks_are_null(root):
    table = to_table(make_batch(num_groups=1, group_size=2), run_id="run", sequence=0)
    older = table.drop_columns(["truncation_reason", "action_mask"])
    root.put(RolloutFile(0, "moar_cats", "old", 0).name, parquet_of(older))
    root.put(RolloutFile(0, "moar_cats", "new", 0).name, encode(table))
    rows = RolloutReader(root, ["truncation_reason", "rollout_id"]).poll(None)
    assert rows.num_rows == 4
    assert read_columns(root, RolloutFile(0, "moar_cats", "old", 0).name, ["action_mask"]).column(0).null_count == 2


@on_one_filesystem
def test_files_that_other_tools_rewrote_are_read_beside_our_own(root, put_file):
    """Other order of columns, large strings and one more column, as Polars and DuckDB would write."""
    groups = put_file(root, "w0", 0)
    table = to_table(make_batch(worker_id="other", seed=77), run_id="run", sequence=0)
    table = table.select(table.column_names[::-1]).append_column("extra", pa.array([1] * table.num_rows))
    for name in ("rollout_id", "group_id", "worker_id"):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, name, table.column(name).cast(pa.large_string()))
    root.put(RolloutFile(0, "moar_cats", "other", 0).name, parquet_of(table))
    reader = reader_of(root)
    rows = reader.poll(None)
    assert reader.broken_files == {}
    assert sorted(ids(rows)) == sorted({*groups, *table.column("group_id").to_pylist()})


def test_a_file_that_vanishes_after_the_listing_is_no_error(unreliable_root, put_file):
    put_file(unreliable_root, "w0", 0)
    groups = put_file(unreliable_root, "w1", 0)
    unreliable_root.fs.failures_of_reads.append(FileNotFoundError("compacted"))
    reader = reader_of(unreliable_root)
    rows = [*ids(reader.poll(None)), *ids(reader.poll(None))]
    assert reader.broken_files == {}
    assert len(rows) == 4
    assert set(groups) < set(rows)


def test_a_failing_filesystem_raises_and_the_next_poll_goes_on(unreliable_root, put_file):
    first = put_file(unreliable_root, "w0", 0)
    reader = reader_of(unreliable_root)
    assert ids(reader.poll(None)) == first
    groups = [group for worker in ("a", "b", "c") for group in put_file(unreliable_root, worker, 0)]
    unreliable_root.fs.failures_of_reads.append(ConnectionResetError("reset by peer"))
    with pytest.raises(StoreError, match="reset by peer"):
        reader.poll(None)
    assert ids(reader.poll(None)) == groups
    assert reader.broken_files == {}


class BreakingFileSystem(AbstractFileSystem):
    """Lists well and reads files as a whole; after some reads of parts of a file it breaks."""

    cachable = False

    def __init__(self, files: dict[str, bytes], num_reads: int) -> None:
        super().__init__()
        self._files, self._num_reads = files, num_reads

    def find(self, path, **_):
        return {name: self.info(name) for name in self._files if name.startswith(path)}

    def info(self, path, **_):
        return {"name": path, "size": len(self._files[path]), "type": "file"}

    def cat_file(self, path, start=None, end=None, **_):
        if start is not None:
            if self._num_reads == 0:
                raise OSError("connection lost while reading")
            self._num_reads -= 1
        return self._files[path][start:end]


@pytest.mark.parametrize("num_reads", [0, 1])
def test_a_connection_that_breaks_while_a_sound_file_is_read_is_no_broken_file(unreliable_root, num_reads):
    """The first read is that of the footer."""
    fs = BreakingFileSystem({unreliable_root.at(NAME): a_file(response_length=100_000)}, num_reads)
    reader = reader_of(replace(unreliable_root, fs=fs))
    with pytest.raises(StoreError, match=r"bad-0\.parquet: OSError: connection lost while reading"):
        reader.poll(None)
    assert reader.broken_files == {}


def test_reading_tokens_of_a_broken_file_names_it(root):
    root.put(NAME, corrupt(a_file(response_length=2000)))
    with pytest.raises(SchemaError, match=r"bad-0\.parquet: .* do not match their digest"):
        read_rows(root, NAME, [(0, 0)], ["response_tokens"])


def test_no_file_is_left_open(root, put_file):
    put_file(root)
    root.put(NAME, b"broken")
    for _ in range(3):
        reader_of(root).poll(None)
    if root.is_local and Path("/proc/self/fd").is_dir():
        targets = [str(Path(f"/proc/self/fd/{fd.name}").resolve()) for fd in Path("/proc/self/fd").iterdir()]
        assert not [target for target in targets if target.startswith(root.path)]


# --- Compaction ---------------------------------------------------------------------------------------------


def compacted_of(rows: pa.Table) -> set[bool]:
    """Whether the rows were read from compacted files."""
    return {RolloutFile.parse(name).is_compacted for name in rows.column("file").unique().to_pylist()}


def test_what_was_delivered_is_not_delivered_again_from_a_compacted_file(root, put_file):
    reader = reader_of(root)
    for sequence in range(2):
        put_file(root, "w0", sequence)
    reader.poll(None)
    late = put_file(root, "w0", 2)
    compact(root)
    rows = reader.poll(None)
    assert ids(rows) == sorted(late)
    assert compacted_of(rows) == {True}
    assert reader.poll(None) is None


@on_one_filesystem
def test_groups_that_were_read_before_a_compaction_are_consumed_after_it(root, put_file):
    groups = [group for sequence in range(2) for group in put_file(root, "w0", sequence)]
    reader = reader_of(root)
    rows = reader.poll(None)
    compact(root)
    reader.consume(of_groups(rows, groups[:3]).select(["group_id"]))
    assert reader.cursor.to_dict() == {
        **EMPTY,
        "files": {"w0": [(0, 1)]},
        "groups": [["w0", 1, [groups[2]]]],
    }
    rest = reader_of(root, through_json(reader.cursor)).poll(None)
    assert (ids(rest), compacted_of(rest)) == ([groups[3]], {True})
    (address,) = {(row["row_group"], row["row"]) for row in rest.slice(1).to_pylist()}
    table = read_rows(root, rest.column("file")[1].as_py(), [address], ["rollout_id"])
    assert table.column(0).to_pylist() == [rest.column("rollout_id")[1].as_py()]


@on_one_filesystem
def test_a_cursor_says_the_same_whichever_file_the_rows_came_from(root, put_file):
    for sequence in range(3):
        put_file(root, "w0", sequence)
    before, after = reader_of(root), reader_of(root)
    rows = before.poll(None)
    before.consume(rows)
    compact(root)
    after.consume(after.poll(None))
    assert after.cursor.to_dict() == before.cursor.to_dict() == {**EMPTY, "files": {"w0": [(0, 3)]}}


def test_a_compacted_file_is_opened_once_however_often_it_is_listed(unreliable_root, put_file):
    for sequence in range(2):
        put_file(unreliable_root, "w0", sequence)
    compact(unreliable_root)
    reader = reader_of(unreliable_root)
    assert reader.poll(None).num_rows == 8
    # Any read from now on would fail.
    unreliable_root.fs.failures_of_reads.append(PermissionError("read again"))
    assert reader.poll(None) is None
    assert unreliable_root.fs.failures_of_reads


def test_a_file_that_a_compaction_deletes_before_it_is_opened_is_found_in_its_replacement(unreliable_root, put_file):
    groups = [group for sequence in range(2) for group in put_file(unreliable_root, "w0", sequence)]
    reader = reader_of(unreliable_root)
    gone = {file.name: unreliable_root.read(file.name) for file in list_files(unreliable_root)}
    compact(unreliable_root)
    (compacted,) = list_files(unreliable_root)
    shown = unreliable_root.fs.shown = [unreliable_root.at(name) for name in gone]
    assert reader.poll(None) is None
    shown.append(unreliable_root.at(compacted.name))
    assert ids(reader.poll(None)) == sorted(groups)
    assert reader.broken_files == {}


@on_one_filesystem
def test_a_broken_compacted_file_stops_nobody_and_is_read_when_it_is_there(root, put_file):
    groups = [group for sequence in range(2) for group in put_file(root, "w0", sequence)]
    name = "rollouts/version=0/env=moar_cats/compacted.0-0.parquet"
    root.put(name, b"torn")
    reader = reader_of(root)
    assert ids(reader.poll(None)) == groups
    assert list(reader.broken_files) == [name]
    root.delete(name)
    late = put_file(root, "w0", 2)
    compact(root)
    assert ids(reader.poll(None)) == late
    assert reader.broken_files == {}


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_whatever_listings_show_of_sources_and_compacted_files_all_is_delivered_once(data):
    root = put_run(f"memory://{uuid.uuid4()}", RunConfig(model="m", env=("moar_cats",)))
    root = replace(root, fs=UnreliableFileSystem())
    names, groups = put_sources_and_compacted(root, num_sources=5)
    reader, history, saved = reader_of(root), [], ("{}", [])
    pending: dict[str, pa.Table] = {}
    saved = json.dumps(reader.cursor.to_dict()), []
    for shown in [*data.draw(st.lists(st.sets(st.sampled_from(names)), max_size=6)), set(names)]:
        root.fs.shown = data.draw(st.permutations([root.at(name) for name in shown]))
        rows = reader.poll(None)
        for group_id in ids(rows):
            assert group_id not in pending
            assert group_id not in history
            pending[group_id] = of_groups(rows, [group_id])
            assert pending[group_id].num_rows == 2
        used = data.draw(st.sets(st.sampled_from(sorted(pending)))) if pending else set()
        if used:
            reader.consume(pa.concat_tables([pending.pop(group_id) for group_id in sorted(used)]))
        history += used
        match data.draw(st.sampled_from(["go on", "checkpoint", "crash"])):
            case "checkpoint":
                saved = json.dumps(reader.cursor.to_dict()), list(history)
            case "crash":
                reader, history, pending = reader_of(root, Cursor.from_dict(json.loads(saved[0]))), list(saved[1]), {}
    rows = reader.poll(None)
    assert sorted([*history, *pending, *ids(rows)]) == sorted(groups)
    root.delete("")


def put_sources_and_compacted(root: Root, num_sources: int) -> tuple[list[str], list[str]]:
    """Files of two groups each, and two compacted ones that hold all but the last; their names, and the group_ids."""
    batches = [make_batch(worker_id="w0", num_groups=2, group_size=2, seed=seed) for seed in range(num_sources)]
    sources = {
        RolloutFile(0, "moar_cats", "w0", sequence).name: encode(to_table(batch, run_id="run", sequence=sequence))
        for sequence, batch in enumerate(batches)
    }
    for name, data in [*sources.items()][:-1]:
        root.put(name, data)
    compact(root, target_bytes=1 + len(next(iter(sources.values()))))
    compacted = [file.name for file in list_files(root)]
    assert len(compacted) == 2
    for name, data in sources.items():
        root.put(name, data)
    return [*sources, *compacted], [group.rollouts[0].group_id for batch in batches for group in batch.groups]


# --- All at once --------------------------------------------------------------------------------------------


@here_and_elsewhere
def test_a_reader_that_polls_while_eight_workers_write_gets_all_once(root):
    num_batches = 3
    committed: list[str] = []

    def write(number: int) -> None:
        with RolloutWriter(root, f"w{number}", flush_groups=2) as writer:
            for seed in range(num_batches):
                batch = make_batch(worker_id=f"w{number}", num_groups=1, group_size=2, seed=100 * number + seed)
                writer.append(batch)
                committed.append(batch.groups[0].rollouts[0].group_id)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    reader, delivered = reader_of(root), []
    for thread in threads:
        thread.start()
    while len(delivered) < 8 * num_batches:
        rows = reader.poll(None)
        if rows is not None:
            delivered += ids(rows)
            reader.consume(rows)
    for thread in threads:
        thread.join()
    assert sorted(delivered) == sorted(committed)
    assert reader.poll(None) is None
    assert all(pairs == [(0, pairs[0][1])] for pairs in reader.cursor.to_dict()["files"].values())


# --- Many files ---------------------------------------------------------------------------------------------


@here_and_elsewhere
def test_many_files_in_one_pass_are_delivered_as_one_by_one(root, put_file, next_batch, monkeypatch):
    for number in range(6):
        put_file(root, f"w{number % 2}", number, version=number // 4)
    compact(root, before_version=1)
    late = [*put_file(root, "w0", 10), *put_file(root, "w1", 11)]
    with RolloutWriter(root, "w2", flush_groups=160) as writer:  # two row groups
        writer.append(next_batch("w2", 160, response_length=1))
    root.put("rollouts/version=1/env=moar_cats/w3-0.parquet", b"broken")
    consumed = of_groups(reader_of(root).poll(None), late[:1])
    cursor = Cursor()
    row = consumed.slice(0, 1).to_pylist()[0]
    cursor.consume(row["worker_id"], row["sequence"], late[:1], whole=False)
    one_by_one, in_one_pass = (reader_of(root, through_json(cursor)) for _ in range(2))
    expected = one_by_one.poll(None)
    monkeypatch.setattr("ludic.root.rows.reader.MANY_FILES", 0)
    found = in_one_pass.poll(None)
    order = [("arrival", "ascending"), ("row_group", "ascending"), ("row", "ascending")]
    assert found.sort_by(order).equals(expected.sort_by(order))
    assert late[0] not in ids(found)
    assert late[1] in ids(found)
    assert in_one_pass.broken_files.keys() == one_by_one.broken_files.keys() != set()
    assert in_one_pass.poll(None) is None
    for reader in (one_by_one, in_one_pass):
        reader.consume(found)
    assert in_one_pass.cursor.to_dict() == one_by_one.cursor.to_dict()


@here_and_elsewhere
def test_a_failure_in_the_middle_of_many_files_loses_no_group(root, put_file, monkeypatch):
    for name in ("_LOCAL", "_REMOTE"):
        monkeypatch.setattr(f"ludic.root.rows.reader.{name}", (1, 2))
    monkeypatch.setattr("ludic.root.rows.reader.MANY_FILES", 0)
    groups = [group_id for number in range(8) for group_id in put_file(root, "w0", number)]
    reader, opened = reader_of(root), []
    original = type(root).open_file

    def fail_late(self, name):
        opened.append(name)
        if len(opened) == 12:
            raise StoreError("the network is down")
        return original(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(type(root), "open_file", fail_late)
        with pytest.raises(StoreError, match="network is down"):
            reader.poll(None)
    assert ids(reader.poll(None)) == groups
