"""Records to Arrow and back, bit for bit."""

from dataclasses import asdict, replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import as_plain, changed, make_batch, make_group, rollout_batches

from ludic.errors import InvalidBatchError, SchemaError
from ludic.records.arrays import plain_rows
from ludic.records.conversion import column_values, from_table, resolve_row, to_table
from ludic.records.extra_columns import EXTRA_TYPES
from ludic.records.rollout import AgentStep, EnvironmentStep, Message, RolloutBatch, RolloutMetadata, ToolCall
from ludic.records.tables import arrow_schema, rollouts_schema
from ludic.records.validation import find_problems


def one_row(**changes) -> RolloutBatch:
    """A batch of one rollout with these fields changed."""
    group = make_group(group_size=1)
    rollout = changed(group.rollouts[0], **changes)
    metadata = RolloutMetadata(worker_id="w", timestamp=datetime(2026, 1, 1, tzinfo=UTC))
    return RolloutBatch(groups=(replace(group, rollouts=(rollout,)),), metadata=metadata)


def round_trip(batch: RolloutBatch) -> RolloutBatch:
    (read,) = from_table(to_table(batch, run_id="run", sequence=0))
    return read


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(rollout_batches())
def test_any_valid_batch_comes_back_bit_for_bit(batch):
    assert find_problems(batch) == []
    table = to_table(batch, run_id="run", sequence=0)
    table.validate(full=True)
    assert table.schema.equals(arrow_schema("rollouts"), check_metadata=True)
    assert as_plain(from_table(table)) == as_plain([batch])


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
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


def test_of_a_key_that_another_program_wrote_twice_into_a_map_the_last_value_is_read():
    table = to_table(one_row(), run_id="run", sequence=0)
    index = table.schema.get_field_index("reward_components")
    field = table.schema.field(index)
    table = table.set_column(index, field, pa.array([[("a", 1.0), ("b", 2.0), ("a", 3.0)]], field.type))
    with pytest.warns(UserWarning, match="already encountered"):
        (batch,) = from_table(table)
    assert batch.groups[0].rollouts[0].reward_components == {"a": 3.0, "b": 2.0}


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


def test_more_than_arrows_offsets_can_count_makes_several_chunks(monkeypatch):
    # 8 rows of 16 tokens, and of texts of about 40 bytes: at most two rows in a chunk.
    batch = make_batch(num_groups=2, group_size=4)
    whole = to_table(batch, run_id="run", sequence=0)
    monkeypatch.setattr("ludic.records.arrays.MAX_ELEMENTS", 40)
    table = to_table(batch, run_id="run", sequence=0)
    chunks = table["response_tokens"].chunks
    assert max(len(chunk.values) for chunk in chunks) <= 40
    assert len(chunks) >= 4
    assert table.equals(whole)
    assert as_plain(from_table(table)) == as_plain([batch])


def test_one_rollout_beyond_arrows_offsets_is_refused_by_name():
    endless = np.broadcast_to(np.int32(7), 2**31)  # one number in memory
    batch = one_row(response_tokens=endless)
    (rollout,) = batch.groups[0].rollouts
    message = (
        rf"rollout {rollout.rollout_id}: response_tokens holds 2147483648 elements, at most 2147483647 fit in a row"
    )
    with pytest.raises(InvalidBatchError, match=message):
        to_table(batch, run_id="run", sequence=0)


# --- Texts that messages hold ------------------------------------------------------------------------------


def two_turns() -> RolloutBatch:
    """Messages: ask, a, b, and a again; steps that say these and others."""
    contents = ["ask", "a", "b", "a"]
    said = {"action": "a", "turn": 0, "action_target": "env", "start": 0, "end": 1}
    outcome = {"turn": 0, "agent_steps": (0,), "reward": None, "terminated": False, "truncated": False}
    return one_row(
        messages=tuple(Message(role="user", content=content) for content in contents),
        agent_steps=(AgentStep(**said), AgentStep(**said | {"action": None}), AgentStep(**said | {"action": "own"})),
        environment_steps=(
            EnvironmentStep(**outcome, observation="ask", action="b", next_observation="a"),
            EnvironmentStep(**outcome, observation="unseen", action=None, next_observation=""),
        ),
    )


def test_a_text_that_is_a_messages_content_is_stored_once_as_the_first_such_message():
    (row,) = to_table(two_turns(), run_id="run", sequence=0).to_pylist()
    assert [(step["action"], step["action_message"]) for step in row["agent_steps"]] == [
        (None, 1),
        (None, None),
        ("own", None),
    ]
    first, second = row["environment_steps"]
    assert [first[name] for name in ("observation", "action", "next_observation")] == [None] * 3
    assert [first[f"{name}_message"] for name in ("observation", "action", "next_observation")] == [0, 2, 1]
    assert [second[name] for name in ("observation", "action", "next_observation")] == ["unseen", None, ""]
    assert [second[f"{name}_message"] for name in ("observation", "action", "next_observation")] == [None] * 3


def test_texts_come_back_from_their_messages():
    batch = two_turns()
    assert as_plain(round_trip(batch)) == as_plain(batch)
    table = to_table(batch, run_id="run", sequence=0)
    columns = table.select(["messages", "agent_steps"])
    assert as_plain(column_values(columns, "agent_steps")) == as_plain([batch.groups[0].rollouts[0].agent_steps])


def test_a_row_as_plain_values_gets_its_texts_back_and_loses_the_references():
    batch = two_turns()
    (row,) = map(resolve_row, to_table(batch, run_id="run", sequence=0).to_pylist())
    (rollout,) = batch.groups[0].rollouts
    steps = [asdict(step) | {"tool_calls": []} for step in rollout.agent_steps]
    assert row["agent_steps"] == steps
    assert [step["next_observation"] for step in row["environment_steps"]] == ["a", ""]
    assert not any(name.endswith("_message") for step in row["environment_steps"] for name in step)


def test_a_reference_beyond_the_messages_is_refused():
    table = to_table(two_turns(), run_id="run", sequence=0)
    index = table.schema.get_field_index("messages")
    shorter = pa.array([[]], table.schema.field(index).type)
    with pytest.raises(SchemaError, match=r"agent_steps\[\].action_message is 1, its row has 0 messages"):
        from_table(table.set_column(index, table.schema.field(index), shorter))


@pytest.mark.parametrize("experts", [[[[1, 2]], [[3]]], [[[1], [2]], [[3]]], [[], []]])
def test_an_array_whose_lists_differ_in_length_is_refused(experts):
    table = to_table(make_batch(num_groups=1, group_size=2), run_id="run", sequence=0)
    index = table.schema.get_field_index("experts")
    column = pa.array([None, experts], table.schema.field(index).type)
    with pytest.raises(SchemaError, match="column 'experts' has lists of unequal lengths in one row, or empty ones"):
        from_table(table.set_column(index, table.schema.field(index), column))


# --- A run's own columns -----------------------------------------------------------------------------------

EXTRA_COLUMNS = dict(zip(("x_a", "x_b", "x_c", "x_d"), EXTRA_TYPES[:4], strict=True))
EXTRA_COLUMNS |= {f"{name}s": f"list<{kind}>" for name, kind in EXTRA_COLUMNS.items()}
_PLAIN = [st.text(max_size=3), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)]
_VALUES = [*_PLAIN, st.booleans()]
_EXTRA = st.fixed_dictionaries(
    {}, optional=dict(zip(EXTRA_COLUMNS, [*_VALUES, *(st.lists(value, max_size=3) for value in _VALUES)], strict=True))
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(_EXTRA, min_size=1, max_size=4))
def test_a_runs_own_columns_come_back_and_what_is_left_out_is_null(extras):
    group = make_group(group_size=len(extras))
    rollouts = tuple(replace(rollout, extra=extra) for rollout, extra in zip(group.rollouts, extras, strict=True))
    batch = RolloutBatch(groups=(replace(group, rollouts=rollouts),), metadata=RolloutMetadata(worker_id="w"))
    assert find_problems(batch, EXTRA_COLUMNS) == []
    table = to_table(batch, run_id="run", sequence=0, extra_columns=EXTRA_COLUMNS)
    table.validate(full=True)
    assert table.schema.equals(rollouts_schema(EXTRA_COLUMNS), check_metadata=True)
    assert table["x_bs"].to_pylist() == [extra.get("x_bs") for extra in extras]
    assert as_plain(from_table(table)) == as_plain([batch])
    assert as_plain(from_table(table.slice(1))) == as_plain(
        [replace(batch, groups=(replace(group, rollouts=rollouts[1:]),))] if len(extras) > 1 else []
    )


def test_null_is_as_good_as_left_out():
    table = to_table(one_row(extra={"x_a": None}), run_id="run", sequence=0, extra_columns={"x_a": "string"})
    (batch,) = from_table(table)
    assert batch.groups[0].rollouts[0].extra == {}


def test_plain_rows_are_those_of_arrow() -> None:
    zones = {zone: pa.array([0, None, -1], pa.timestamp("us", zone)) for zone in ("UTC", "Europe/Berlin", "+01:00")}
    maps = pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64()))
    table = pa.table({**zones, "naive": pa.array([0, 1, 2], pa.timestamp("us")), "maps": maps})
    assert str(plain_rows(table)) == str(table.to_pylist())
    assert plain_rows(table, maps_as_dicts=True) == table.to_pylist(maps_as_pydicts="lossy")
