"""Records to Arrow and back, bit for bit."""

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from strategies import as_plain, make_batch, make_group, rollout_batches

from ludic.errors import InvalidBatchError
from ludic.records import RolloutBatch, RolloutMetadata, ToolCall
from ludic.schema import arrow_schema, column_values, find_problems, from_table, to_table


def one_row(**changes) -> RolloutBatch:
    """A batch of one rollout with these fields changed."""
    group = make_group(group_size=1)
    rollout = replace(group.rollouts[0], **changes)
    metadata = RolloutMetadata(worker_id="w", timestamp=datetime(2026, 1, 1, tzinfo=UTC))
    return RolloutBatch(groups=(replace(group, rollouts=(rollout,)),), metadata=metadata)


def round_trip(batch: RolloutBatch) -> RolloutBatch:
    (read,) = from_table(to_table(batch, run_id="run", sequence=0))
    return read


@given(rollout_batches())
def test_any_valid_batch_comes_back_bit_for_bit(batch):
    assert find_problems(batch) == []
    table = to_table(batch, run_id="run", sequence=0)
    table.validate(full=True)
    assert table.schema.equals(arrow_schema("rollouts"), check_metadata=True)
    assert as_plain(from_table(table)) == as_plain([batch])


@given(rollout_batches(max_groups=3))
def test_a_slice_of_several_chunks_comes_back_as_its_rows(batch):
    table = to_table(batch, run_id="run", sequence=0)
    rows = [rollout for group in batch.groups for rollout in group.rollouts]
    # One row a chunk, behind a first row that every chunk's buffers still hold.
    chunked = pa.concat_tables([table.slice(row, 1) for row in range(1, len(rows))] or [table.slice(0, 0)])
    read = [rollout for part in from_table(chunked) for group in part.groups for rollout in group.rollouts]
    assert as_plain(read) == as_plain(rows[1:])


def test_provenance_is_stamped_on_every_row():
    batch = make_batch(num_groups=2, group_size=3, worker_id="host-1", seed=5)
    table = to_table(batch, run_id="run-7", sequence=9)
    assert set(table["run_id"].to_pylist()) == {"run-7"}
    assert set(table["worker_id"].to_pylist()) == {"host-1"}
    assert set(table["sequence"].to_pylist()) == {9}
    assert set(table["created_at"].to_pylist()) == {batch.metadata.timestamp}
    assert table["group_key"].to_pylist() == [group.key for group in batch.groups for _ in range(3)]


def test_lengths_are_columns_of_their_own():
    # Two turns in 7 tokens: [0, 3) and [4, 7), with an observation at token 3.
    batch = RolloutBatch(
        groups=(make_group(group_size=1, prompt_length=5, response_length=7, num_turns=2),),
        metadata=RolloutMetadata(worker_id="w"),
    )
    row = to_table(batch, run_id="run", sequence=0).to_pylist()[0]
    assert (row["prompt_length"], row["response_length"], row["action_length"], row["num_turns"]) == (5, 7, 6, 2)
    assert row["action_mask"] == [True, True, True, False, True, True, True]


def test_no_mask_and_a_mask_of_ones_stay_apart():
    ones = np.ones(16, dtype=np.bool_)
    assert round_trip(one_row(action_mask=None)).groups[0].rollouts[0].action_mask is None
    assert round_trip(one_row(action_mask=ones)).groups[0].rollouts[0].action_mask.tolist() == ones.tolist()


def test_arrays_read_back_share_the_buffers_of_the_table():
    table = to_table(make_batch(num_groups=1, group_size=3), run_id="run", sequence=0)
    flat = table["response_tokens"].chunk(0).values.to_numpy(zero_copy_only=True)
    arrays = column_values(table, "response_tokens")
    assert [array.dtype for array in arrays] == [np.int32] * 3
    assert all(np.shares_memory(array, flat) for array in arrays)
    assert not arrays[0].flags.writeable


def test_a_decimal_temperature_reads_as_it_was_set_and_is_stored_again_unchanged():
    # float32(0.7) is 0.699999988...; the shortest decimal that rounds to it is 0.7.
    table = to_table(one_row(temperature=0.7), run_id="run", sequence=0)
    (read,) = from_table(table)
    assert read.groups[0].rollouts[0].temperature == 0.7
    assert to_table(read, run_id="run", sequence=0).equals(table)


def test_numbers_of_numpy_become_numbers_of_the_schema():
    batch = one_row(seed=np.int64(3), episode_reward=np.float32(0.5), reward_components={"a": 1}, terminated=np.True_)
    assert find_problems(batch) == []
    rollout = round_trip(batch).groups[0].rollouts[0]
    assert (rollout.seed, rollout.episode_reward, rollout.reward_components) == (3, 0.5, {"a": 1.0})
    assert rollout.terminated is True


def test_tool_calls_within_steps_come_back_as_records():
    call = ToolCall(id="1", name="add", arguments='{"a": 1}', result="2")
    step = replace(make_group(group_size=1).rollouts[0].agent_steps[0], tool_calls=(call,))
    assert round_trip(one_row(agent_steps=(step,))).groups[0].rollouts[0].agent_steps == (step,)


def test_batches_are_told_apart_by_worker_sequence_and_time():
    first, second = make_batch(seed=1), make_batch(seed=2, worker_id="worker-1")
    tables = [
        to_table(first, run_id="run", sequence=0),
        to_table(second, run_id="run", sequence=0),
        to_table(make_batch(seed=3, worker_id="worker-1"), run_id="run", sequence=1),
    ]
    read = from_table(pa.concat_tables(tables))
    assert [part.metadata.worker_id for part in read] == ["worker-0", "worker-1", "worker-1"]
    assert as_plain(read[:2]) == as_plain([first, second])


def test_an_empty_table_holds_no_batch():
    assert from_table(arrow_schema("rollouts").empty_table()) == []


def test_more_tokens_than_int32_offsets_can_count_are_refused():
    # 3 x 2^30 tokens that share one number in memory; a column holds at most 2^31 - 1.
    endless = np.broadcast_to(np.int32(7), 2**30)
    group = make_group(group_size=3)
    rollouts = tuple(replace(rollout, response_tokens=endless) for rollout in group.rollouts)
    batch = RolloutBatch(groups=(replace(group, rollouts=rollouts),), metadata=RolloutMetadata(worker_id="w"))
    with pytest.raises(InvalidBatchError, match=r"response_tokens holds 3221225472 elements.*append fewer groups"):
        to_table(batch, run_id="run", sequence=0)
