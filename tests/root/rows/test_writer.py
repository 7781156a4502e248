import io
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from filesystems import num_files
from fsspec.implementations.local import LocalFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import as_plain, changed, make_batch, make_group, rollout_batches

from ludic.errors import ConfigError, InvalidBatchError, NameTakenError, StoreError
from ludic.records.conversion import from_table, to_table
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.records.tables import arrow_schema
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, list_files
from ludic.root.rows.parquet import group_starts, read_columns, read_rows, row_group_bounds
from ludic.root.rows.writer import RolloutWriter, commit
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

on_one_root = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)

on_one_filesystem = pytest.mark.parametrize("root_url", ["memory"], indirect=True)
"""For tests of what the writer does before it puts a file; how a file gets into a root is for the others here."""


def never_by_itself(root: Root, worker_id: str = "w0", **options) -> RolloutWriter:
    """A writer that writes only when it is told to."""
    return RolloutWriter(root, worker_id, **{"flush_groups": 10**9, "flush_age_s": 1e9, **options})


def stored_groups(root: Root, worker_id: str) -> list:
    """Groups of a worker as plain values, in the order of its files."""
    columns = arrow_schema("rollouts").names
    files = sorted((file for file in list_files(root) if file.worker_id == worker_id), key=lambda f: f.sequence)
    tables = [read_columns(root, file.name, columns) for file in files]
    return [as_plain(group) for table in tables for batch in from_table(table) for group in batch.groups]


def wait_for_files(root: Root, count: int) -> None:
    """Until the thread has written so many files; pytest's timeout ends a wait in vain."""
    while num_files(root) < count:
        time.sleep(0.01)


def stamped(batch: RolloutBatch, worker_id: str) -> RolloutBatch:
    return replace(batch, metadata=replace(batch.metadata, worker_id=worker_id))


# --- What comes back ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["local"], indirect=True)
@settings(on_one_root, max_examples=8)
@given(batches=st.lists(rollout_batches(), min_size=1, max_size=2))
def test_what_was_appended_comes_back_bit_for_bit(root, batches):
    worker_id = f"w-{uuid.uuid4()}"
    with never_by_itself(root, worker_id) as writer:
        for batch in batches:
            writer.append(stamped(batch, worker_id))
            writer.flush()  # a file each: two batches may draw one group_id
    appended = [as_plain(group) for batch in batches for group in batch.groups]
    assert sorted(map(str, stored_groups(root, worker_id))) == sorted(map(str, appended))


def test_rows_say_who_wrote_them_in_which_file_and_run(root, next_batch):
    batch = next_batch(num_groups=1)
    with never_by_itself(root) as writer:
        writer.append(next_batch())
        writer.flush()
        writer.append(batch)
    table = read_columns(
        root, RolloutFile(0, "moar_cats", "w0", 1).name, ["worker_id", "sequence", "run_id", "created_at"]
    )
    assert (
        table.to_pylist()
        == [{"worker_id": "w0", "sequence": 1, "run_id": root.run_id, "created_at": batch.metadata.timestamp}] * 2
    )


def test_single_rows_are_read_in_the_order_asked_for(root, next_batch):
    batch = next_batch(num_groups=300)
    with never_by_itself(root) as writer:
        writer.append(batch)
    (file,) = list_files(root)
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    # 600 rows of groups of 2: row groups of 256, 256 and 88.
    columns = ["response_tokens", "rollout_id"]
    for addresses, indexes in [
        ([(2, 87), (0, 3), (1, 0), (0, 3)], [599, 3, 256, 3]),
        ([(1, 4), (1, 5), (1, 6)], [260, 261, 262]),
        ([(1, 5), (1, 4)], [261, 260]),
        ([(0, 255), (1, 0)], [255, 256]),
    ]:
        table = read_rows(root, file.name, addresses, columns)
        assert table.column("rollout_id").to_pylist() == [rollouts[index].rollout_id for index in indexes]
        assert table.column("response_tokens").to_pylist() == [
            rollouts[index].response_tokens.tolist() for index in indexes
        ]


# --- Files and row groups ----------------------------------------------------------------------------------


def test_each_version_and_environment_gets_a_file_of_its_own(root):
    groups = [
        make_group(seed=seed, policy_version=version, env_name=env)
        for seed, (version, env) in enumerate(
            [(3, "moar_cats"), (4, "moar_cats"), (3, "reasoning_gym/a b%"), (3, "moar_cats")]
        )
    ]
    with never_by_itself(root) as writer:
        writer.append(RolloutBatch(groups=tuple(groups), metadata=RolloutMetadata(worker_id="w0")))
    assert {(f.version, f.env_name): f.sequence for f in list_files(root)} == {
        (3, "moar_cats"): 0,
        (4, "moar_cats"): 1,
        (3, "reasoning_gym/a b%"): 2,
    }
    assert root.list("rollouts/version=3") == [
        "rollouts/version=3/env=moar_cats/w0-0.parquet",
        "rollouts/version=3/env=reasoning_gym%2Fa%20b%25/w0-2.parquet",
    ]
    assert sorted(len(stored_groups(root, "w0")[i][1]["rollouts"]) for i in range(4)) == [4] * 4


@on_one_filesystem
def test_a_group_whose_weights_were_swapped_lies_whole_with_its_oldest_rollout(root):
    group = make_group(group_size=3, policy_version=5)
    rollouts = [
        replace(rollout, policy_version=version, policy_version_last=9)
        for rollout, version in zip(group.rollouts, [6, 5, 7], strict=True)
    ]
    with never_by_itself(root) as writer:
        writer.append(
            RolloutBatch(groups=(replace(group, rollouts=tuple(rollouts)),), metadata=RolloutMetadata(worker_id="w0"))
        )
    (file,) = list_files(root)
    assert file.version == 5
    assert read_columns(root, file.name, ["policy_version"]).column(0).to_pylist() == [6, 5, 7]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5), data=st.data())
def test_a_group_is_never_split_between_row_groups_or_files(sizes, data, tmp_path_factory):
    root = _local_root(tmp_path_factory)
    worst = make_group(group_size=300, response_length=1, prompt_length=1)
    groups = [_shrunk(worst, size, number) for number, size in enumerate(sizes)]
    flush_groups = data.draw(st.integers(1, 4))
    with RolloutWriter(root, "w0", flush_groups=flush_groups, flush_age_s=1e9) as writer:
        for group in groups:
            writer.append(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w0")))
    seen: list[str] = []
    for file in sorted(list_files(root), key=lambda file: file.sequence):
        parquet = pq.ParquetFile(root.at(file.name))
        for index in range(parquet.num_row_groups):
            table = parquet.read_row_group(index, columns=["group_id"])
            ids = [table.column(0)[start].as_py() for start in group_starts(table).tolist()]
            assert len(ids) == 1 or table.num_rows <= 256
            seen += ids
    assert seen == [f"group-{number}" for number in range(len(sizes))]


def _shrunk(group, size: int, number: int):
    return replace(
        group,
        rollouts=tuple(
            replace(r, group_id=f"group-{number}", group_size=size, rollout_id=f"{number}-{r.rollout_id}")
            for r in group.rollouts[:size]
        ),
    )


def _local_root(tmp_path_factory) -> Root:
    return put_run(str(tmp_path_factory.mktemp("root") / "run"), RunConfig(model="m", env=("e",)))


@on_one_filesystem
def test_groups_of_one_partition_are_one_file_whatever_lies_between_them(root):
    groups = [make_group(seed=seed, policy_version=version) for seed, version in enumerate([1, 2, 1, 1, 2])]
    with never_by_itself(root) as writer:
        writer.append(RolloutBatch(groups=tuple(groups), metadata=RolloutMetadata(worker_id="w0")))
    assert [(file.version, file.sequence) for file in list_files(root)] == [(1, 0), (2, 1)]
    assert stored_groups(root, "w0") == [as_plain(groups[index]) for index in (0, 2, 3, 1, 4)]


def test_a_runs_own_columns_are_files_columns(tmp_path, next_batch):
    columns = {"x_judge": "string", "x_spans": "list<int64>"}
    root = put_run(str(tmp_path / "run"), RunConfig(model="m", env=("e",), extra_columns=columns))
    batch = next_batch()
    first, second = batch.groups[0].rollouts
    rollouts = (replace(first, extra={"x_judge": "gpt", "x_spans": [1, 2]}), second)
    batch = replace(batch, groups=(replace(batch.groups[0], rollouts=rollouts),))
    with never_by_itself(root) as writer:
        writer.append(batch)
        with pytest.raises(
            InvalidBatchError, match=r"x_mood is not a column of this run, whose extra_columns are x_judge"
        ):
            writer.append(
                replace(
                    batch, groups=(replace(batch.groups[0], rollouts=(replace(first, extra={"x_mood": 1}), second)),)
                )
            )
    (file,) = list_files(root)
    table = pq.read_table(root.at(file.name), partitioning=None)
    assert table.schema.names[-2:] == ["x_judge", "x_spans"]
    assert table.select(["x_judge", "x_spans"]).to_pylist() == [
        {"x_judge": "gpt", "x_spans": [1, 2]},
        {"x_judge": None, "x_spans": None},
    ]
    assert read_rows(root, file.name, [(0, 1), (0, 0)], ["x_judge"]).to_pylist() == [
        {"x_judge": None},
        {"x_judge": "gpt"},
    ]
    assert as_plain(from_table(table)[0].groups) == as_plain(batch.groups)


# --- Large values ------------------------------------------------------------------------------------------


def lengths_of_row_groups(lengths: Sequence[int], **limits: int) -> list[list[int]]:
    """Response lengths of each row group, for groups of one rollout."""
    groups = tuple(make_group(group_size=1, response_length=length, seed=seed) for seed, length in enumerate(lengths))
    batch = RolloutBatch(groups=groups, metadata=RolloutMetadata(worker_id="w0"))
    table = to_table(batch, run_id="run", sequence=0)
    return [list(lengths[start:stop]) for start, stop in row_group_bounds(table, **limits)]


def test_row_groups_are_bounded_by_the_bytes_of_their_own_groups():
    # A token is 12 bytes in memory and the rest of a row less than 2,000: two short ones fit behind each other, a long
    # one has a row group to itself, and how long others are does not matter.
    assert lengths_of_row_groups([1000, 1000, 9000, 1000, 1000, 1000], max_bytes=30_000) == [
        [1000, 1000],
        [9000],
        [1000, 1000],
        [1000],
    ]
    assert lengths_of_row_groups([1000] * 4, max_bytes=1 << 20) == [[1000] * 4]
    assert lengths_of_row_groups([1000] * 4, max_rows=3) == [[1000] * 3, [1000]]


def test_a_group_too_large_to_be_read_at_once_is_split_by_rows(monkeypatch):
    monkeypatch.setattr("ludic.root.rows.parquet.LARGEST_GROUP_BYTES", 60_000)
    group, other = make_group(group_size=6, response_length=1000), make_group(group_size=1, seed=1)
    table = to_table(
        RolloutBatch(groups=(group, other), metadata=RolloutMetadata(worker_id="w0")), run_id="run", sequence=0
    )
    assert row_group_bounds(table, max_bytes=30_000) == [(0, 2), (2, 4), (4, 7)]


class CountingFileSystem(LocalFileSystem):
    """Counts the bytes that are read of files."""

    cachable = False
    num_bytes = 0

    def open(self, path: str, mode: str = "rb", **options: Any) -> "CountingFile":
        return CountingFile(path, self)


class CountingFile(io.FileIO):
    def __init__(self, path: str, fs: CountingFileSystem) -> None:
        super().__init__(path)
        self.fs = fs

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        self.fs.num_bytes += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer)
        self.fs.num_bytes += num_bytes
        return num_bytes


def test_long_texts_stay_unread_when_tokens_are_read(tmp_path, run_config, next_batch):
    observation = np.random.default_rng(0).integers(97, 123, 4_000_000).astype(np.uint8).tobytes().decode()
    batch = next_batch()
    step = replace(batch.groups[0].rollouts[0].environment_steps[0], observation=observation)
    rollouts = [replace(rollout, environment_steps=(step,)) for rollout in batch.groups[0].rollouts]
    root = put_run(str(tmp_path / "run"), run_config)
    with never_by_itself(root) as writer:
        writer.append(replace(batch, groups=(replace(batch.groups[0], rollouts=tuple(rollouts)),)))
    (file,) = list_files(root)
    counting = replace(root, fs=CountingFileSystem())
    table = read_rows(counting, file.name, [(0, 0), (0, 1)], ["response_tokens", "response_logprobs", "token_rewards"])
    assert table.column("response_tokens").to_pylist() == [rollout.response_tokens.tolist() for rollout in rollouts]
    assert 0 < counting.fs.num_bytes < 200_000 < Path(root.at(file.name)).stat().st_size


# --- When it flushes ---------------------------------------------------------------------------------------


@on_one_filesystem
def test_enough_groups_flush_by_themselves(root, next_batch):
    with RolloutWriter(root, "w0", flush_groups=3, flush_age_s=1e9) as writer:
        writer.append(next_batch(num_groups=2))
        assert num_files(root) == 0
        writer.append(next_batch(num_groups=1))
        wait_for_files(root, 1)


@on_one_filesystem
def test_enough_bytes_flush_by_themselves(root, next_batch):
    batch = next_batch(response_length=1000)
    size_bytes = to_table(batch, run_id=root.run_id, sequence=0).get_total_buffer_size()
    with never_by_itself(root, flush_bytes=size_bytes + 1) as writer:
        writer.append(batch)
        assert num_files(root) == 0
        writer.append(next_batch())
        wait_for_files(root, 1)


@on_one_filesystem
def test_exactly_enough_bytes_flush_by_themselves(root, next_batch):
    batch = next_batch(response_length=1000)
    size_bytes = to_table(batch, run_id=root.run_id, sequence=0).get_total_buffer_size()
    with never_by_itself(root, flush_bytes=size_bytes) as writer:
        writer.append(batch)
        wait_for_files(root, 1)


@on_one_filesystem
def test_age_flushes_what_nobody_adds_to(root, next_batch):
    with RolloutWriter(root, "w0", flush_groups=10**9, flush_age_s=0.05) as writer:
        writer.append(next_batch())
        wait_for_files(root, 1)


@pytest.mark.parametrize("delay_s", [0.0, 0.03])
def test_each_batch_is_a_file_however_slow_the_filesystem_is(tmp_path, run_config, next_batch, monkeypatch, delay_s):
    def commit_late(*args):
        time.sleep(delay_s)
        commit(*args)

    monkeypatch.setattr("ludic.root.rows.writer.commit", commit_late)
    root, batches = put_run(str(tmp_path / "run"), run_config), [next_batch(num_groups=n) for n in (2, 1, 3, 1)]
    with RolloutWriter(root, "w0", flush_age_s=1e9, file_per_batch=True) as writer:
        for batch in batches:
            writer.append(batch)
    assert [(made.sequence, made.num_groups) for made in writer.made] == [(0, 2), (1, 1), (2, 3), (3, 1)]
    assert stored_groups(root, "w0") == [as_plain(group) for batch in batches for group in batch.groups]


@on_one_filesystem
def test_close_flushes(root, next_batch):
    writer = never_by_itself(root)
    writer.append(next_batch())
    assert num_files(root) == 0
    writer.close()
    assert num_files(root) == 1
    writer.close()
    assert num_files(root) == 1


def test_flush_returns_when_readers_see_everything(root, next_batch):
    with never_by_itself(root) as writer:
        for number in range(3):
            writer.append(next_batch())
            writer.flush()
            assert num_files(root) == number + 1


@on_one_filesystem
def test_a_flush_of_nothing_writes_nothing_and_leaves_later_batches_to_gather(root, next_batch):
    with never_by_itself(root) as writer:
        writer.flush()
        writer.append(next_batch())
        writer.append(next_batch())
    assert num_files(root) == 1


@on_one_filesystem
def test_evaluations_go_to_a_folder_of_their_own(root, next_batch):
    with never_by_itself(root, folder="evals") as writer:
        writer.append(next_batch())
    assert root.list("evals") == ["evals/version=0/env=moar_cats/w0-0.parquet"]
    assert list_files(root) == []
    assert list_files(root, folder="evals") == [RolloutFile(0, "moar_cats", "w0", 0, "evals")]


# --- What it refuses ---------------------------------------------------------------------------------------


@on_one_filesystem
def test_a_bad_row_is_named_and_nothing_of_its_batch_is_written(root, next_batch):
    sound, bad = next_batch(num_groups=2), next_batch(num_groups=2)
    logprobs = bad.groups[1].rollouts[0].response_logprobs.copy()
    logprobs[2] = np.nan
    rollout = changed(bad.groups[1].rollouts[0], response_logprobs=logprobs)
    group = replace(bad.groups[1], rollouts=(rollout, *bad.groups[1].rollouts[1:]))
    with never_by_itself(root) as writer:
        with pytest.raises(InvalidBatchError) as caught:
            writer.append(replace(bad, groups=(bad.groups[0], group)))
        writer.append(sound)
    assert f"rollout {rollout.rollout_id}: response_logprobs is nan at token 2, wanted a finite number" in str(
        caught.value
    )
    assert stored_groups(root, "w0") == [as_plain(group) for group in sound.groups]


@on_one_filesystem
@pytest.mark.parametrize("worker_id", ["", ".hidden", "_hidden", "a/b", "a b", "ü", "x" * 201, "w\n"])
def test_a_worker_id_that_is_no_file_name_or_a_hidden_one_is_refused(root, worker_id):
    with pytest.raises(ConfigError, match="is not a file name"):
        RolloutWriter(root, worker_id)


def test_two_workers_with_one_name_are_told(root, next_batch):
    with never_by_itself(root) as first:
        first.append(next_batch())
    second = never_by_itself(root)
    second.append(next_batch())
    with pytest.raises(
        NameTakenError, match=r"w0-0\.parquet exists with other content: two processes use the same name"
    ):
        second.flush()
    with pytest.raises(NameTakenError):
        second.close()
    assert num_files(root) == 1


# --- When the filesystem fails or stalls -------------------------------------------------------------------


def test_append_returns_while_a_write_stalls(unreliable_root, next_batch):
    fs = unreliable_root.fs
    fs.is_up.clear()
    with RolloutWriter(unreliable_root, "w0", flush_groups=1, flush_age_s=1e9) as writer:
        writer.append(next_batch())
        assert fs.waits.wait(60)
        batches = [next_batch() for _ in range(10)]
        for batch in batches:
            writer.append(batch)
        assert num_files(unreliable_root) == 0
        fs.is_up.set()
    assert len(stored_groups(unreliable_root, "w0")) == 11
    assert stored_groups(unreliable_root, "w0")[1:] == [as_plain(batch.groups[0]) for batch in batches]


def test_append_waits_when_too_much_waits_to_be_written(unreliable_root, next_batch):
    """Memory stays bounded: 1 batch in the stalled write, 64 behind it, and the next append waits."""
    fs, taken = unreliable_root.fs, []
    fs.is_up.clear()
    writer = RolloutWriter(unreliable_root, "w0", flush_groups=1, flush_age_s=1e9)
    writer.append(next_batch())
    assert fs.waits.wait(60)
    batches = [next_batch() for _ in range(70)]

    def append_all() -> None:
        for batch in batches:
            writer.append(batch)
            taken.append(batch)

    thread = threading.Thread(target=append_all)
    thread.start()
    while len(taken) < 64:
        time.sleep(0.01)
    thread.join(0.1)
    assert len(taken) == 64
    fs.is_up.set()
    thread.join()
    writer.close()
    assert len(stored_groups(unreliable_root, "w0")) == 71


def test_append_waits_when_too_many_bytes_wait_to_be_written(unreliable_root, next_batch):
    """Four times flush_bytes at most: 1 batch in the stalled write, 3 behind it, and the next append waits."""
    fs, taken = unreliable_root.fs, []
    batches = [next_batch(response_length=1000) for _ in range(6)]
    sizes = [to_table(batch, run_id=unreliable_root.run_id, sequence=0).get_total_buffer_size() for batch in batches]
    fs.is_up.clear()
    writer = RolloutWriter(unreliable_root, "w0", flush_groups=1, flush_age_s=1e9, flush_bytes=max(sizes))

    def append_all() -> None:
        for batch in batches:
            writer.append(batch)
            taken.append(batch)

    thread = threading.Thread(target=append_all)
    thread.start()
    while len(taken) < 4:
        time.sleep(0.01)
    thread.join(0.1)
    assert len(taken) == 4
    fs.is_up.set()
    thread.join()
    writer.close()
    assert len(stored_groups(unreliable_root, "w0")) == 6


@on_one_filesystem
def test_a_batch_that_does_not_fit_behind_what_gathers_lets_that_be_written_first(root, next_batch):
    small, large = next_batch(), next_batch(response_length=2000)
    size_bytes = to_table(large, run_id=root.run_id, sequence=0).get_total_buffer_size()
    # The small one is not enough for a flush by itself, and together they are more than may wait.
    with never_by_itself(root, flush_bytes=size_bytes // 4) as writer:
        writer.append(small)
        assert num_files(root) == 0
        writer.append(large)
        assert stored_groups(root, "w0")[0] == as_plain(small.groups[0])  # the large one may have followed by now
    assert num_files(root) == 2


def test_an_error_surfaces_at_the_next_call_and_the_write_is_tried_again(unreliable_root, next_batch):
    unreliable_root.fs.failures_before.append(ConnectionError("the network is down"))
    batches = [next_batch() for _ in range(3)]
    with never_by_itself(unreliable_root) as writer:
        writer.append(batches[0])
        with pytest.raises(StoreError, match=r"w0-0\.parquet: ConnectionError: the network is down"):
            writer.flush()
        writer.append(batches[1])
        writer.flush()
        writer.append(batches[2])
    assert stored_groups(unreliable_root, "w0") == [as_plain(batch.groups[0]) for batch in batches]


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(appends=st.lists(st.tuples(st.sampled_from(["none", "before", "after"]), st.booleans()), min_size=1, max_size=8))
def test_nothing_is_lost_repeated_or_reordered_however_often_writes_fail(unreliable_root, appends):
    fs, worker_id = unreliable_root.fs, f"w-{uuid.uuid4()}"
    writer = RolloutWriter(unreliable_root, worker_id, flush_groups=2, flush_age_s=1e9)
    taken = []
    for seed, (failure, flushes) in enumerate(appends):
        group = make_group(seed=seed, group_size=1, response_length=1)
        batch = RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id=worker_id))
        if failure != "none":
            getattr(fs, f"failures_{failure}").append(ConnectionError("down"))
        _insist(lambda batch=batch: writer.append(batch))
        taken.append(as_plain(group))
        if flushes:
            _insist(writer.flush)
            assert stored_groups(unreliable_root, worker_id) == taken
    fs.failures_before.clear()
    fs.failures_after.clear()
    writer.close()
    assert stored_groups(unreliable_root, worker_id) == taken


def _insist(call) -> None:
    """As a caller that goes on after an error."""
    while True:
        try:
            return call()
        except StoreError:
            continue


def test_close_tries_once_more_what_failed(unreliable_root, next_batch):
    unreliable_root.fs.failures_before.append(ConnectionError("down"))
    batches = [next_batch(), next_batch()]
    writer = never_by_itself(unreliable_root)
    writer.append(batches[0])
    with pytest.raises(StoreError):
        writer.flush()
    writer.append(batches[1])
    writer.close()
    assert stored_groups(unreliable_root, "w0") == [as_plain(batch.groups[0]) for batch in batches]


def test_close_tries_once_more_what_failed_unseen(unreliable_root, next_batch):
    fs = unreliable_root.fs
    fs.failures_before.append(ConnectionError("down"))
    writer = never_by_itself(unreliable_root)
    writer.append(next_batch())
    writer.flush(wait=False)
    while fs.failures_before:
        time.sleep(0.001)
    writer.close()
    assert fs.written == ["w0-0.parquet"]


def test_files_appear_in_the_order_of_their_sequence(unreliable_root, next_batch):
    fs = unreliable_root.fs
    fs.failures_before.append(ConnectionError("down"))
    with never_by_itself(unreliable_root) as writer:
        for version in (2, 0, 1):
            writer.append(next_batch(policy_version=version))
        with pytest.raises(StoreError):
            writer.flush()
        writer.append(next_batch(policy_version=0))
    assert fs.written == ["w0-0.parquet", "w0-1.parquet", "w0-2.parquet", "w0-3.parquet"]


def test_close_says_when_something_could_not_be_written(unreliable_root, next_batch):
    unreliable_root.fs.failures_before += [ConnectionError("down for good")] * 5
    writer = never_by_itself(unreliable_root)
    writer.append(next_batch())
    with pytest.raises(StoreError, match="down for good"):
        writer.close()


@pytest.mark.parametrize("root_url", ["local", "s3"], indirect=True)
def test_many_writers_share_a_root(root):
    def write(number: int) -> None:
        with RolloutWriter(root, f"w{number}", flush_groups=1) as writer:
            for seed in range(3):
                writer.append(make_batch(worker_id=f"w{number}", num_groups=1, group_size=1, seed=10 * number + seed))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(stored_groups(root, f"w{number}")) == 3 for number in range(4))
