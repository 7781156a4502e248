"""From a plan to packed micro-batches: exactly the stored tokens, each once, and no more of a file than was planned."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from tiny_runs import fill, train_config

from ludic.errors import StoreError
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.parquet import PAGE_BYTES
from ludic.root.rows.tombstones import list_quarantined
from ludic.training.batches.reading import read_rank_batch, read_sequences
from ludic.training.batches.source import BatchPlan


@pytest.fixture
def plan_of(open_stream):
    """plan_of(root): the plan of step 1."""
    return lambda root, **settings: open_stream(root, **settings).next_batch().plan


def used_rows(plan: BatchPlan):
    return plan.rows.filter(plan.rows["used"])


def by_id(groups):
    return {rollout.rollout_id: rollout for group in groups.values() for rollout in group.rollouts}


def tokens_of(micro_batch):
    """Response tokens with their sampler's logprobs, advantages and mask, as they go into the loss; sorted."""
    columns = (micro_batch.targets, micro_batch.sampler_logprobs, micro_batch.advantages, micro_batch.action_mask)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_sequences_are_what_was_stored_in_the_order_of_the_plan(new_root, plan_of):
    root = new_root(groups_per_batch=5)
    # Two files, so that the plan crosses a border; three turns, so that there is a mask.
    groups = fill(root, num_files=2, groups_per_file=3, num_turns=3)
    stored, rows = by_id(groups), used_rows(plan_of(root))
    advantages = {
        rollout.rollout_id: advantage
        for group in groups.values()
        for rollout, advantage in zip(group.rollouts, group.rloo_advantages(), strict=True)
    }
    sequences = read_sequences(root, rows)
    assert sequences.rollout_id == rows["rollout_id"].to_pylist()
    assert len(sequences) == 5 * 4
    for index, rollout_id in enumerate(sequences.rollout_id):
        rollout = stored[rollout_id]
        assert_same(sequences.prompt_tokens[index], rollout.prompt_tokens)
        assert_same(sequences.response_tokens[index], rollout.response_tokens)
        assert_same(sequences.columns["response_logprobs"][index], rollout.response_logprobs)
        assert_same(sequences.columns["action_mask"][index], rollout.action_mask)
        assert sequences.advantage[index] == pytest.approx(advantages[rollout_id], abs=1e-12)
        assert sequences.weight[index] == 1.0
        assert sequences.temperature[index] == np.float32(rollout.temperature)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_a_mask_of_ones_is_stored_as_none_and_comes_back_as_none(new_root, plan_of):
    root = new_root()
    fill(root, num_files=1)
    assert set(read_sequences(root, used_rows(plan_of(root))).columns["action_mask"]) == {None}


def test_no_rows_are_no_sequences(new_root, plan_of):
    root = new_root()
    fill(root, num_files=1)
    assert len(read_sequences(root, used_rows(plan_of(root)).slice(0, 0))) == 0


def test_what_the_filters_dropped_is_not_read(new_root, plan_of):
    root = new_root()
    groups = fill(root, num_files=1, rewards=[[1.0, 0.0, None, 0.5], [1.0, 0.5, 0.5, 0.0]], num_groups=2)
    plan = plan_of(root)
    config = train_config().batch
    share = read_rank_batch(root, config, plan, 0, 1)
    failed = [rollout for rollout in by_id(groups).values() if rollout.episode_reward is None]
    assert used_rows(plan).num_rows == 7
    assert share.num_action_tokens == 7 * 16
    assert failed[0].rollout_id not in read_sequences(root, used_rows(plan)).rollout_id


def test_two_ranks_share_the_sequences_of_one(new_root, plan_of):
    root = new_root()
    fill(root, num_files=1, num_turns=2)
    plan, config = plan_of(root), train_config(max_tokens_per_micro_batch=64)
    whole = read_rank_batch(root, config.batch, plan, 0, 1)
    shares = [read_rank_batch(root, config.batch, plan, rank, 2) for rank in (0, 1)]
    expected = sorted(token for micro_batch in whole.micro_batches for token in tokens_of(micro_batch))
    found = [token for share in shares for micro_batch in share.micro_batches for token in tokens_of(micro_batch)]
    assert sorted(found) == expected
    assert len(expected) == 2 * 4 * 16  # groups x episodes x response
    assert {len(share.micro_batches) for share in shares} == {2}  # 4 sequences of 24 tokens each, 2 in 64 tokens
    for name in ("num_action_tokens", "num_tokens"):
        assert [getattr(share, name) for share in shares] == [getattr(whole, name) / 2] * 2
    assert [share.token_imbalance for share in shares] == [1.0, 1.0]


def test_ranks_read_whole_files_where_that_is_even(new_root, plan_of):
    # Four files of two groups of 4: each of two ranks has two files to itself, although one could have a half of each.
    root = new_root(groups_per_batch=8)
    fill(root, num_files=4, groups_per_file=2)
    plan = plan_of(root)
    files = []
    for rank in (0, 1):
        of_rank, ranges = watched(root)
        read_rank_batch(of_rank, train_config().batch, plan, rank, 2)
        files.append({path for path, _, _ in ranges})
    assert [len(paths) for paths in files] == [2, 2]
    assert not files[0] & files[1]


def test_sequences_over_the_limit_are_cut_and_counted(new_root, open_stream):
    root = new_root()
    # Prompts of 8: responses of 16 keep 10 of 18 tokens' room, and those of 4 fit.
    fill(root, num_files=1, groups_per_file=1, response_length=16)
    fill(root, num_files=1, groups_per_file=1, response_length=4, worker_id="w1-test", seed=1)
    batch = open_stream(root, max_seq_len=18).next_batch()
    assert batch.num_truncated == sum(batch.plan.rows["seq_len_truncated"].to_pylist()) == 4
    assert batch.num_action_tokens == 4 * 10 + 4 * 4
    assert batch.num_tokens == 4 * 18 + 4 * 12


class WatchedFileSystem(LocalFileSystem):
    """Notes which bytes of which files are read: (path, start, stop)."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        read = file.read

        def note(length: int = -1) -> bytes:
            data = read(length)
            self.ranges.append((path, file.tell() - len(data), file.tell()))
            return data

        file.read = note
        return file


def watched(root: Root) -> tuple[Root, list[tuple[str, int, int]]]:
    """The same root, and what will have been read through it."""
    fs = WatchedFileSystem()
    return replace(root, fs=fs), fs.ranges


def byte_range(metadata: pq.FileMetaData, row_group: int) -> tuple[int, int]:
    """Where a row group begins and ends in its file."""
    columns = [metadata.row_group(row_group).column(index) for index in range(metadata.num_columns)]
    starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
    stops = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
    return min(starts), max(stops)


@pytest.mark.slow
def test_only_the_row_groups_of_the_plan_are_read(new_root, plan_of, monkeypatch):
    monkeypatch.setattr("ludic.root.rows.parquet._SMALL_BYTES", 0)  # a small file is read at once
    # 256 rows make a row group, here a group each: 4 a file, of which the plan needs the first file's first two.
    root = new_root(group_size=256)
    fill(root, num_files=2, groups_per_file=4, response_length=400)
    rows = used_rows(plan_of(root))
    name = "rollouts/version=0/env=moar_cats/w0-test-0.parquet"
    assert set(zip(rows["file"].to_pylist(), rows["row_group"].to_pylist(), strict=True)) == {(name, 0), (name, 1)}
    metadata = pq.read_metadata(root.at(name))
    root, ranges = watched(root)
    assert len(read_sequences(root, rows)) == 2 * 256
    # pyarrow finds the footer by reading the last 64 kB at once.
    size = root.fs.size(root.at(name))
    data_reads = [(path, start, stop) for path, start, stop in ranges if stop < size]

    def is_read(row_group: int) -> bool:
        # In its middle: a read takes whole pages of 64 kB, and so the first bytes of the next row group.
        start, stop = byte_range(metadata, row_group)
        assert stop - start > 2 * PAGE_BYTES
        return any(first <= (start + stop) // 2 < last for _, first, last in data_reads)

    assert [is_read(row_group) for row_group in range(4)] == [True, True, False, False]
    assert {path for path, _, _ in ranges} == {root.at(name)}


def test_the_next_batch_is_read_before_it_is_asked_for(new_root, open_stream):
    root, ranges = watched(new_root())
    fill(root, num_files=1)
    stream = open_stream(root)
    stream.next_batch()
    ranges.clear()
    stream.start_plan(2, 0)
    while not ranges:  # until the plan is there
        threading.Event().wait(0.01)
    assert stream.next_batch().plan.step == 2


def test_a_planned_file_that_is_gone_is_named(new_root, plan_of):
    root = new_root()
    fill(root, num_files=1)
    rows = used_rows(plan_of(root))
    root.delete("rollouts")
    with pytest.raises(StoreError, match=r"w0-test-0\.parquet was planned for a step and is missing"):
        read_sequences(root, rows)


def test_a_planned_file_that_is_broken_is_quarantined_so_that_the_next_trainer_plans_without_it(new_root, plan_of):
    root = new_root()
    fill(root, num_files=1)
    rows = used_rows(plan_of(root))
    (name,) = set(rows["file"].to_pylist())
    root.put(name, b"torn")
    with pytest.raises(StoreError, match=r"w0-test-0\.parquet: not a Parquet file.* start the trainer again"):
        read_sequences(root, rows)
    assert [file.name for file in list_quarantined(root)] == [name]
    assert root.list("rollouts") == []


def test_a_plan_is_read_as_well_when_its_files_were_compacted_since(new_root, plan_of):
    root = new_root(groups_per_batch=5)
    fill(root, num_files=2, groups_per_file=3, num_turns=3)
    rows = used_rows(plan_of(root))
    before = read_sequences(root, rows)
    compact(root)
    after = read_sequences(root, rows)
    assert after.rollout_id == rows["rollout_id"].to_pylist()
    for name in ("response_tokens", "action_mask"):
        arrays = ({"response_tokens": each.response_tokens, **each.columns}[name] for each in (after, before))
        for found, expected in zip(*arrays, strict=True):
            assert_same(found, expected)
    assert after.advantage == before.advantage


def test_advantages_by_token_reach_the_loss_and_are_cut_with_the_response(new_root, open_stream, tmp_path):
    file = tmp_path / "index.sql"
    file.write_text("select rollout_id, range(response_length) as token_advantages from rollouts")
    root = new_root()
    fill(root, num_files=1)
    batch = open_stream(root, max_seq_len=18, advantage=str(file)).next_batch()
    (micro_batch,) = batch.micro_batches
    # 8 sequences: prompts of 8 leave 10 of 16 response tokens
    assert micro_batch.advantages.tolist() == [float(index) for index in range(10)] * 8
