"""What `compact` leaves: the same rows in few files that prune, whatever happened on the way."""

import io
import itertools
import json
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filesystems import Fault, FaultyFileSystem, ProcessDied, SharedStorage
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import make_batch

import ludic.root.maintenance.compaction as compaction
from ludic.records.conversion import to_table
from ludic.records.tables import VERSION_KEY, arrow_schema
from ludic.root.attempts import start_attempt
from ludic.root.json_records import LatestPolicy
from ludic.root.maintenance.compaction import Skipped, compact, sealed_before
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, SourceFile, find_replacement, list_files, read_plans, read_sources
from ludic.root.rows.parquet import encode, group_ranges, read_columns
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.root.rows.writer import RolloutWriter
from ludic.root.weights.policies import point_latest
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

locally = pytest.mark.parametrize("root_url", ["local"], indirect=True)
"""For what does not depend on how files are stored."""

COLUMNS = arrow_schema("rollouts").names
PARTITION = "rollouts/version=0/env=moar_cats"


def rows_of(root: Root, columns: list[str] = COLUMNS) -> pa.Table:
    """All rows of all files, a row as often as it is stored."""
    tables = [read_columns(root, file.name, columns) for file in list_files(root)]
    return pa.concat_tables(tables).sort_by("rollout_id")


def names_of(root: Root) -> list[str]:
    return [name.rpartition("/")[2] for name in root.list("rollouts")]


def delivered(root: Root, cursor: Cursor | None = None) -> list[str]:
    """group_ids that a new reader delivers, one for each row."""
    rows = RolloutReader(root, [], cursor).poll(None)
    return [] if rows is None else rows.column("group_id").to_pylist()


def footer(root: Root, name: str) -> pq.FileMetaData:
    return pq.ParquetFile(io.BytesIO(root.read(name))).metadata


# --- The files ----------------------------------------------------------------------------------------------


def test_small_files_become_one_that_names_its_sources(root, put_file):
    for worker_id in ("w0", "w1"):
        for sequence in range(3):
            put_file(root, worker_id, sequence)
    before = rows_of(root)
    report = compact(root)
    assert names_of(root) == ["compacted.0-0.parquet"]
    assert rows_of(root).equals(before)
    (partition,) = report.partitions
    assert (partition.name, partition.num_files_before, partition.num_files_after) == (PARTITION, 6, 1)
    assert partition.size_bytes_before > partition.size_bytes_after == len(root.read(list_files(root)[0].name))
    assert report.skipped == []
    held = json.loads(footer(root, list_files(root)[0].name).metadata[b"ludic.sources"])
    assert sorted(map(tuple, held)) == [(worker_id, sequence) for worker_id in ("w0", "w1") for sequence in range(3)]


def test_a_second_call_does_nothing(root, put_file):
    for sequence in range(3):
        put_file(root, "w0", sequence)
    compact(root)
    files = {name: root.read(name) for name in root.list("")}
    assert compact(root).partitions == []
    assert {name: root.read(name) for name in root.list("")} == files


@locally
def test_a_dry_run_says_what_a_run_does_and_changes_nothing(root, put_file):
    for sequence in range(3):
        put_file(root, "w0", sequence)
    names = root.list("")
    (would,) = compact(root, dry_run=True).partitions
    assert root.list("") == names
    (did,) = compact(root).partitions
    assert would == replace(did, size_bytes_after=did.size_bytes_before)


@pytest.mark.slow
@locally
def test_rows_are_sorted_by_group_and_row_groups_hold_whole_groups(root, put_file):
    for worker_id in ("w0", "w1", "w2"):
        put_file(root, worker_id, 0, num_groups=300)
    compact(root)
    (file,) = list_files(root)
    with pq.ParquetFile(io.BytesIO(root.read(file.name))) as parquet:
        groups = [
            parquet.read_row_group(number, columns=["group_id"])["group_id"].to_pylist()
            for number in range(parquet.num_row_groups)
        ]
        ranges = group_ranges(parquet)
    # 900 groups of two rows.
    assert sum(map(len, groups)) == 1800
    assert len(groups) == -(-1800 // compaction.ROW_GROUP_ROWS)
    assert list(chain(*groups)) == sorted(chain(*groups))
    assert not any(set(first) & set(second) for first, second in pairwise(groups))
    assert ranges == [(of_row_group[0], of_row_group[-1]) for of_row_group in groups]


@locally
def test_a_target_size_makes_several_files_each_of_whole_sources_in_the_order_of_time(root, next_batch):
    for sequence in range(6):
        batch = in_order_of_time(next_batch("w0", 2), sequence)
        put(root, RolloutFile(0, "moar_cats", "w0", sequence), batch)
    size_bytes = max(root.sizes("rollouts").values())
    compact(root, target_bytes=size_bytes + 1)
    assert names_of(root) == [f"compacted.0-{index}.parquet" for index in range(3)]
    held = [read_sources(root, file) for file in list_files(root)]
    assert held == [[SourceFile("w0", 2 * index), SourceFile("w0", 2 * index + 1)] for index in range(3)]


def in_order_of_time(batch, index: int):
    """The batch with group_ids that sort by `index`, as those of uuid7 do by time."""
    groups = tuple(
        replace(group, rollouts=tuple(replace(r, group_id=f"{index:04}-{number}") for r in group.rollouts))
        for number, group in enumerate(batch.groups)
    )
    return replace(batch, groups=groups)


def put(root: Root, file: RolloutFile, batch, change: Callable[[pa.Table], pa.Table] = lambda table: table) -> None:
    table = change(to_table(batch, run_id=root.run_id, sequence=file.sequence))
    assert root.put_if_absent(file.name, encode(table))


@locally
def test_a_single_file_is_left_as_it_is(root, put_file):
    put_file(root)
    assert compact(root).partitions == []
    assert names_of(root) == ["w0-0.parquet"]


@pytest.mark.slow
def test_environments_and_versions_stay_apart_and_evaluations_are_compacted_too(root, next_batch):
    for worker_id, folder in (("w0", "rollouts"), ("w1", "evals")):
        with RolloutWriter(root, worker_id, folder=folder) as writer:
            for version in (0, 1):
                for env_name in ("moar_cats", "odd/name"):
                    for _ in range(2):
                        writer.append(next_batch(worker_id, policy_version=version, env_name=env_name))
                        writer.flush()
    report = compact(root, before_version=1)
    assert [partition.name for partition in report.partitions] == [
        f"{folder}/version=0/env={env}" for folder in ("rollouts", "evals") for env in ("moar_cats", "odd%2Fname")
    ]
    assert {(file.version, file.is_compacted) for file in list_files(root)} == {(0, True), (1, False)}
    assert {(file.version, file.is_compacted) for file in list_files(root, folder="evals")} == {(0, True), (1, False)}


def test_files_that_come_late_go_into_the_next_plan(root, put_file):
    groups = [group for sequence in range(2) for group in put_file(root, "w0", sequence)]
    compact(root)
    first = root.read(f"{PARTITION}/compacted.0-0.parquet")
    groups += [group for sequence in range(2) for group in put_file(root, "late", sequence)]
    compact(root)
    assert names_of(root) == ["compacted.0-0.parquet", "compacted.1-0.parquet"]
    assert root.read(f"{PARTITION}/compacted.0-0.parquet") == first
    assert Counter(delivered(root)) == Counter(groups * 2)
    assert [plan.number for plan in read_plans(root)] == [0, 1]


def test_a_source_that_its_worker_writes_again_after_a_lost_answer_is_deleted_again(root, put_file):
    groups = [group for sequence in range(2) for group in put_file(root, "w0", sequence)]
    again = root.read(f"{PARTITION}/w0-0.parquet")
    compact(root)
    assert root.put_if_absent(f"{PARTITION}/w0-0.parquet", again)
    assert Counter(delivered(root)) == Counter(groups * 2)
    (partition,) = compact(root).partitions
    assert (partition.num_files_before, partition.num_files_after) == (2, 1)
    assert names_of(root) == ["compacted.0-0.parquet"]


@locally
def test_the_replacement_of_a_file_is_found_by_the_log(root, put_file):
    for sequence in range(2):
        put_file(root, "w0", sequence)
    compact(root)
    compacted = RolloutFile(0, "moar_cats", "compacted.0", 0)
    assert find_replacement(root, RolloutFile(0, "moar_cats", "w0", 1)) == compacted
    assert find_replacement(root, RolloutFile(0, "moar_cats", "w0", 2)) is None
    assert find_replacement(root, RolloutFile(1, "moar_cats", "w0", 1)) is None
    assert find_replacement(root, compacted) is None


# --- What is sealed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latest", "window", "sealed"),
    [(None, 2, 0), (10, None, 0), (10, 2, 8), (10, 0, 9), (10, 1, 9), (1, 8, 0)],
)
@locally
def test_sealed_is_what_workers_have_left_and_the_trainer_is_past(root, latest, window, sealed):
    if latest is not None:
        point_latest(root, LatestPolicy(version=latest, budget=1))
    start_attempt(root, config={"max_off_policy_steps": 5})
    start_attempt(root, config={"max_off_policy_steps": window})
    assert sealed_before(root) == sealed


@locally
def test_nothing_is_sealed_before_a_trainer_started(root):
    point_latest(root, LatestPolicy(version=10, budget=1))
    assert sealed_before(root) == 0


# --- What can't be compacted --------------------------------------------------------------------------------


def damaged(data: bytes) -> bytes:
    """The footer is sound, the pages are not."""
    return data[:4] + bytes(len(data[4:-10_000])) + data[-10_000:]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-5], "not a Parquet file, or a broken one"),
        (damaged, "not a Parquet file, or a broken one"),
    ],
)
@locally
def test_broken_files_are_left_alone_and_named(root, put_file, damage, reason):
    groups = [group for sequence in (0, 1, 3) for group in put_file(root, "w0", sequence)]
    put_file(root, "w0", 2, num_groups=200)
    name = f"{PARTITION}/w0-2.parquet"
    root.put(name, damage(root.read(name)))
    for _ in range(2):
        (skipped,) = compact(root).skipped
        assert skipped.name == name
    assert reason in skipped.reason or "left out of" in skipped.reason
    assert names_of(root) == ["compacted.0-0.parquet", "w0-2.parquet"]
    assert Counter(delivered(root)) == Counter(groups * 2)


@locally
def test_a_copy_under_another_name_is_left_alone(root, put_file):
    for sequence in range(2):
        put_file(root, "w0", sequence)
    root.put(f"{PARTITION}/copy-0.parquet", root.read(f"{PARTITION}/w0-0.parquet"))
    (skipped,) = compact(root).skipped
    assert skipped == Skipped(
        f"{PARTITION}/copy-0.parquet", "it holds rows of another worker or sequence, so it is a copy under a wrong name"
    )
    assert names_of(root) == ["compacted.0-0.parquet", "copy-0.parquet"]


@locally
def test_a_file_whose_columns_contradict_the_others_is_left_alone(root, next_batch):
    for sequence, value in enumerate((1, 2, "three")):
        file = RolloutFile(0, "moar_cats", "w0", sequence)
        put(root, file, next_batch("w0"), lambda table, value=value: table.append_column("x_judge", [[value] * 2]))
    (skipped,) = compact(root).skipped
    assert skipped.name == f"{PARTITION}/w0-2.parquet"
    assert "x_judge" in skipped.reason
    assert names_of(root) == ["compacted.0-0.parquet", "w0-2.parquet"]


@locally
def test_a_plan_that_is_no_plan_counts_as_an_empty_one(root, put_file):
    for sequence in range(2):
        put_file(root, "w0", sequence)
    root.put(f"compactions/{PARTITION}/0.json", b'{"outputs": [{"na')
    compact(root)
    assert names_of(root) == ["compacted.1-0.parquet"]


@locally
def test_an_output_that_was_stored_broken_stays_and_its_sources_go_into_the_next_plan(root, put_file):
    groups = [group for sequence in range(2) for group in put_file(root, "w0", sequence)]
    root.put(f"{PARTITION}/compacted.0-0.parquet", b"PAR1 and no more")
    report = compact(root)
    assert [skipped.name for skipped in report.skipped] == [f"{PARTITION}/compacted.0-0.parquet"]
    assert names_of(root) == ["compacted.0-0.parquet", "compacted.1-0.parquet"]
    assert Counter(delivered(root)) == Counter(groups * 2)
    assert compact(root).partitions == []


@pytest.mark.parametrize("small_bytes", [0, 1 << 21])
@locally
def test_sources_of_an_output_that_was_damaged_before_they_were_deleted_stay(root, put_file, monkeypatch, small_bytes):
    # Files above this size are not read at once when they are opened; real outputs are much larger.
    monkeypatch.setattr("ludic.root.rows.parquet._SMALL_BYTES", small_bytes)
    groups = [group for sequence in range(2) for group in put_file(root, "w0", sequence)]
    assert crash(root, 2, only_changes=True)  # the plan and the output are there
    name = f"{PARTITION}/compacted.0-0.parquet"
    data = bytearray(root.read(name))
    data[len(data) // 3] ^= 1
    root.put(name, bytes(data))
    (skipped,) = compact(root).skipped
    assert (skipped.name, "do not match their digest" in skipped.reason) == (name, True)
    root.delete(name)
    assert Counter(delivered(root)) == Counter(groups * 2)


@locally
def test_what_expired_since_the_plan_is_left_out(root, put_file):
    groups = [put_file(root, "w0", sequence) for sequence in range(4)]
    assert crash(root, 1, only_changes=True)  # the plan is there
    assert names_of(root) == [f"w0-{sequence}.parquet" for sequence in range(4)]
    root.delete(f"{PARTITION}/w0-1.parquet")
    compact(root)
    assert names_of(root) == ["compacted.0-0.parquet"]
    assert Counter(delivered(root)) == Counter((groups[0] + groups[2] + groups[3]) * 2)


# --- Schemas ------------------------------------------------------------------------------------------------


def older(table: pa.Table) -> pa.Table:
    """As a minor version before this one would have written it: a nullable column is not there yet."""
    table = table.drop_columns(["error"])
    return table.replace_schema_metadata({**table.schema.metadata, VERSION_KEY: b"1.0"})


def newer(table: pa.Table) -> pa.Table:
    """As a later minor version will: a column more, and a field more in a struct."""
    index = table.schema.get_field_index("messages")
    texts = [[message | {"lang": "de"} for message in messages] for messages in table["messages"].to_pylist()]
    struct = table.schema.field(index).type.value_type
    field = pa.field(
        "messages", pa.list_(pa.field("element", pa.struct([*struct, pa.field("lang", pa.string())]), nullable=False))
    )
    table = table.set_column(index, field.with_nullable(False), pa.array(texts, field.type))
    table = table.append_column("mood", pa.array(["fine"] * table.num_rows))
    return table.replace_schema_metadata({**arrow_schema("rollouts").metadata, VERSION_KEY: b"1.77"})


@locally
def test_older_files_gain_nulls_and_what_newer_ones_hold_is_kept(root, next_batch):
    for sequence, change in enumerate((older, newer, lambda table: table.append_column("x_seen", [[7, 8]]))):
        put(root, RolloutFile(0, "moar_cats", "w0", sequence), next_batch("w0"), change)
    before = rows_of(root)
    compact(root)
    assert names_of(root) == ["compacted.0-0.parquet"]
    assert rows_of(root).equals(before)
    stored = pq.ParquetFile(io.BytesIO(root.read(f"{PARTITION}/compacted.0-0.parquet")))
    assert stored.metadata.metadata[VERSION_KEY] == b"1.77"
    table = stored.read().sort_by("sequence")
    assert table["mood"].to_pylist() == [None, None, "fine", "fine", None, None]
    assert table["x_seen"].to_pylist() == [None] * 4 + [7, 8]
    languages = [{message["lang"] for message in messages} for messages in table["messages"].to_pylist()]
    assert languages == [{None}] * 2 + [{"de"}] * 2 + [{None}] * 2


# --- Memory -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=8),
    buffer_bytes=st.sampled_from([0, 5_000, 1 << 30]),
    ahead_bytes=st.sampled_from([0, 1 << 30]),
    row_group_rows=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_whatever_fits_into_memory_all_rows_come_out_once_in_whole_groups(
    sizes, buffer_bytes, ahead_bytes, row_group_rows, seed
):
    root = put_run(f"memory://{uuid.uuid4()}", RunConfig(model="m", env=("moar_cats",)))
    for sequence, num_groups in enumerate(sizes):
        batch = make_batch(worker_id="w0", num_groups=num_groups, group_size=2, response_length=2, seed=seed + sequence)
        put(root, RolloutFile(0, "moar_cats", "w0", sequence), batch)
    before = rows_of(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_MOST_BYTES", buffer_bytes)
        patch.setattr(compaction, "_READ_AHEAD_BYTES", ahead_bytes)
        patch.setattr(compaction, "ROW_GROUP_ROWS", row_group_rows)
        compact(root)
    assert rows_of(root).equals(before)
    (file,) = list_files(root)
    with pq.ParquetFile(io.BytesIO(root.read(file.name))) as parquet:
        groups = [
            parquet.read_row_group(number, columns=["group_id"])["group_id"].to_pylist()
            for number in range(parquet.num_row_groups)
        ]
    indexes = [index for index, of_row_group in enumerate(groups) for _ in set(of_row_group)]
    assert len(indexes) == sum(sizes)
    assert all(len(of_row_group) <= max(2, row_group_rows) for of_row_group in groups)
    if buffer_bytes == 1 << 30:
        assert list(chain(*groups)) == sorted(chain(*groups))
    root.delete("")


@locally
def test_large_groups_have_row_groups_of_their_own(root, put_file, monkeypatch):
    groups = [group for sequence in range(2) for group in put_file(root, "w0", sequence)]
    monkeypatch.setattr(compaction, "_MOST_BYTES", 1)
    compact(root)
    (file,) = list_files(root)
    assert footer(root, file.name).num_row_groups == len(groups) == 4
    assert Counter(delivered(root)) == Counter(groups * 2)


# --- Crashes ------------------------------------------------------------------------------------------------


def connection(root: Root) -> tuple[Root, FaultyFileSystem]:
    """A connection of one process to a root, whose calls the test controls."""
    fs = FaultyFileSystem(SharedStorage(LocalFileSystem(auto_mkdir=True) if root.is_local else root.fs))
    return replace(root, fs=fs), fs


def put_two_partitions(root: Root, put_file) -> list[str]:
    """Two files each; the group_ids, one for each row."""
    groups = []
    for version, sequences in ((0, (0, 1)), (1, (2, 3))):
        for sequence in sequences:
            groups += put_file(root, "w0", sequence, num_groups=1, version=version)
    return sorted(groups * 2)


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_a_crash_before_any_storage_call_loses_and_doubles_nothing(root_url, run_config, put_file):
    """Over memory:// at each call, on a disk at those that change something: what is stored is the same between."""
    index, is_over = 0, False
    while not is_over:
        root = put_run(f"{root_url}-{index}", run_config)
        groups = put_two_partitions(root, put_file)
        is_over = not crash(root, index, only_changes=not root_url.startswith("memory"))
        assert sorted(delivered(root)) == groups, f"after a crash before call {index}"
        compact(root)
        assert names_of(root) == ["compacted.0-0.parquet"] * 2
        assert sorted(rows_of(root, ["group_id", "rollout_id"])["group_id"].to_pylist()) == groups
        assert sorted(delivered(root)) == groups
        root.delete("")
        index += 1
    # Two plans, two outputs and four deletions.
    assert index > 8


def crash(root: Root, index: int, *, only_changes: bool) -> bool:
    """Compact in a process that dies before its call `index`; False when it has fewer."""
    process, fs = connection(root)
    if not only_changes:
        fs.faults.extend([*[None] * index, Fault.DIE_BEFORE])
    else:
        die_at_change(fs, index)
    with suppress(ProcessDied):
        compact(process)
    return fs.is_dead


def die_at_change(fs: FaultyFileSystem, index: int) -> None:
    changes, change = itertools.count(), fs._change

    def die(*args, **options):
        if next(changes) == index:
            fs.faults.append(Fault.DIE_BEFORE)
        return change(*args, **options)

    fs._change = die
