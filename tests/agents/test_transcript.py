"""Token transcripts from model calls: masks, logprobs, forks, and storage that grows by what is new."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents import transcript
from ludic.agents.transcript import CompletionSpan, RowBuilder, TranscriptBuilder
from ludic.records.columns import ArrayColumn, Ragged


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def nats(*logprobs: float) -> dict[str, Any]:
    return {"response_logprobs": np.array(logprobs, dtype=np.float32)}


def kept(*lists: list[int]) -> dict[str, Any]:
    return {"kept_tokens": Ragged.of(lists, np.int32)}


def experts(*numbers: int) -> dict[str, Any]:
    """One expert in one layer, for each token that was read."""
    return {"experts": np.array(numbers, np.int16)[:, None, None]}


def test_one_call_is_a_row_without_a_mask() -> None:
    builder = TranscriptBuilder()
    assert builder.transcripts() == ()
    assert builder.add_call(ids(1, 2), ids(3, 4, 5), nats(-1, -2, -3)) == CompletionSpan(
        segment_index=0, start=0, end=3
    )
    (row,) = builder.transcripts()
    assert (row.prompt_tokens.tolist(), row.response_tokens.tolist()) == ([1, 2], [3, 4, 5])
    assert (row.columns["response_logprobs"].tolist(), row.action_mask) == ([-1, -2, -3], None)
    assert row.columns.keys() == {"prompt_tokens", "response_tokens", "response_logprobs"}
    assert (row.segment_index, row.parent_segment_index) == (0, None)
    assert [each.dtype for each in row.columns.values()] == ["i4", "i4", "f4"]


def test_a_later_call_adds_what_its_prompt_adds_and_its_completion() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1, 2), ids(3, 4), nats(-1, -2))
    # The prompt is 1 2, the completion 3 4, and a tool's result 5 6 7.
    assert builder.add_call(ids(1, 2, 3, 4, 5, 6, 7), ids(8), nats(-4)) == CompletionSpan(
        segment_index=0, start=5, end=6
    )
    (row,) = builder.transcripts()
    assert row.prompt_tokens.tolist() == [1, 2]
    assert row.response_tokens.tolist() == [3, 4, 5, 6, 7, 8]
    assert row.action_mask is not None
    assert row.action_mask.tolist() == [True, True, False, False, False, True]
    assert row.columns["response_logprobs"].tolist() == [-1, -2, 0, 0, 0, -4]


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(ids(1, 2, 3, 9, 5), id="another token in the answer"),
        pytest.param(ids(1, 2, 3), id="a shorter answer"),
        pytest.param(ids(1, 2), id="the same prompt"),
    ],
)
def test_a_prompt_that_does_not_extend_the_row_starts_a_new_one(prompt: np.ndarray) -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1, 2), ids(3, 4), nats(-1, -2))
    assert builder.add_call(prompt, ids(8), nats(-4)) == CompletionSpan(segment_index=1, start=0, end=1)
    first, second = builder.transcripts()
    assert first.response_tokens.tolist() == [3, 4]
    assert (second.prompt_tokens.tolist(), second.response_tokens.tolist()) == (prompt.tolist(), [8])
    assert (second.action_mask, second.segment_index, second.parent_segment_index) == (None, 1, 0)


def test_two_conversations_in_turn_are_two_rows() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1, 2), ids(3))
    builder.add_call(ids(1, 9), ids(4))
    builder.add_call(ids(1, 2, 3, 5), ids(6))
    builder.add_call(ids(1, 9, 4, 7), ids(8))
    # A third conversation has two tokens in common with the second, one with the first.
    builder.add_call(ids(1, 9, 2), ids(3))
    rows = builder.transcripts()
    assert [row.response_tokens.tolist() for row in rows] == [[3, 5, 6], [4, 7, 8], [3]]
    assert [row.parent_segment_index for row in rows] == [None, 0, 1]


def test_a_completion_without_logprobs_leaves_its_row_without() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1), ids(2), nats(-1))
    builder.add_call(ids(1, 2), ids(3))
    (row,) = builder.transcripts()
    assert row.columns.keys() == {"prompt_tokens", "response_tokens"}


def test_tokens_of_a_known_row_are_added_in_order() -> None:
    row = RowBuilder(segment_index=3)
    row.add_context(ids(1))
    row.add_context(ids(2))
    assert row.add_completion(ids(3, 4), nats(-1, -2)) == CompletionSpan(segment_index=3, start=0, end=2)
    row.add_context(ids(5))
    found = row.transcript(2)
    assert (found.prompt_tokens.tolist(), found.response_tokens.tolist()) == ([1, 2], [3, 4, 5])
    assert found.action_mask is not None
    assert found.action_mask.tolist() == [True, True, False]
    assert (found.segment_index, found.parent_segment_index) == (3, 2)


def test_numbers_of_other_types_become_those_of_the_row() -> None:
    row = RowBuilder()
    row.add_context(np.array([1]))  # int64
    row.add_completion(np.array([2, 3]), {"response_logprobs": np.array([-1, -0.5])})  # float64
    row.add_context(ids())
    row.add_completion(ids(4), nats(-2))  # nothing between two completions, so nothing is masked
    transcript = row.transcript()
    assert transcript.response_tokens.tolist() == [2, 3, 4]
    assert transcript.columns["response_logprobs"].tolist() == [-1, -0.5, -2]
    assert transcript.action_mask is None
    assert [each.dtype for each in transcript.columns.values()] == ["i4", "i4", "f4"]


def test_a_row_without_a_completion_is_a_prompt() -> None:
    row = RowBuilder()
    row.add_context(ids(1, 2))
    found = row.transcript()
    assert (found.prompt_tokens.tolist(), len(found.response_tokens)) == ([1, 2], 0)
    assert (found.response_tokens.dtype, found.columns["response_logprobs"].dtype) == ("i4", "f4")


def test_a_completion_needs_a_value_for_each_token() -> None:
    with pytest.raises(ValueError, match="response_logprobs of a completion has length 1, response_tokens has 2"):
        TranscriptBuilder().add_call(ids(1), ids(2, 3), nats(-1))


def test_completions_of_a_row_have_as_many_numbers_a_token() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1), ids(3), experts(10))
    of_two_layers = {"experts": np.zeros((3, 2, 1), np.int16)}
    with pytest.raises(ValueError, match=r"experts of a completion has shape \(2, 1\) at each token, the row's first"):
        builder.add_call(ids(1, 3, 4), ids(5), of_two_layers)
    builder.add_call(ids(1, 9), ids(5, 6), of_two_layers)  # a row of its own


def test_a_name_that_is_no_array_is_refused() -> None:
    with pytest.raises(ValueError, match="spell of a completion is not an array of a row, wanted one of"):
        TranscriptBuilder().add_call(ids(1), ids(2), {"spell": np.zeros(1)})


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)  # few ids, so that prompts are often alike by chance


@given(st.lists(st.tuples(st.booleans(), TOKENS, TOKENS), min_size=1, max_size=8))
def test_each_call_can_be_read_from_its_row_and_nothing_is_stored_twice(
    turns: list[tuple[bool, list[int], list[int]]],
) -> None:
    """turns: whether history is forgotten, the new tokens of the prompt, and the completion."""
    builder, history, calls = TranscriptBuilder(), [], []
    for is_new, suffix, completion in turns:
        prompt = suffix if is_new else [*history, *suffix]
        logprobs = [-float(len(calls)) - index / 8 for index in range(len(completion))]
        span = builder.add_call(ids(*prompt), ids(*completion), nats(*logprobs))
        calls.append((span, prompt, completion, logprobs))
        history = [*prompt, *completion]
    rows = builder.transcripts()
    for span, prompt, completion, logprobs in calls:
        row = rows[span.segment_index]
        before = [*row.prompt_tokens.tolist(), *row.response_tokens[: span.start].tolist()]
        assert before == prompt
        assert row.response_tokens[span.start : span.end].tolist() == completion
        assert row.columns["response_logprobs"][span.start : span.end].tolist() == logprobs
    sampled = [np.ones(len(row.response_tokens), bool) if row.action_mask is None else row.action_mask for row in rows]
    assert sum(int(mask.sum()) for mask in sampled) == sum(len(completion) for _, _, completion, _ in calls)
    assert all(not row.columns["response_logprobs"][~mask].any() for row, mask in zip(rows, sampled, strict=True))
    num_stored = sum(len(row.prompt_tokens) + len(row.response_tokens) for row in rows)
    assert num_stored <= sum(len(suffix) + len(completion) for _, suffix, completion in turns)
    assert [row.segment_index for row in rows] == list(range(len(rows)))
    assert all(row.parent_segment_index < row.segment_index for row in rows[1:])  # type: ignore[operator]


def test_kept_tokens_are_empty_at_tokens_that_were_not_sampled() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1, 2), ids(3, 4), nats(-1, -2) | kept([3, 9], [4]))
    builder.add_call(ids(1, 2, 3, 4, 5), ids(8), nats(-4) | kept([7, 8]))
    (row,) = builder.transcripts()
    assert [each.tolist() for each in row.columns["kept_tokens"]] == [[3, 9], [4], [], [7, 8]]


def test_experts_are_of_each_token_that_was_read_when_it_was_read_first() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1, 2), ids(3, 4), experts(10, 20, 30))
    # A tool's result is 5. The call reads all again, with other experts: weights may have changed in between.
    builder.add_call(ids(1, 2, 3, 4, 5), ids(6, 7), experts(11, 21, 31, 40, 50, 60))
    builder.add_call(ids(1, 9), ids(6), experts(12, 90))
    first, second = builder.transcripts()
    assert first.columns["experts"].tolist() == [[[each]] for each in (10, 20, 30, 40, 50, 60)]
    assert second.columns["experts"].tolist() == [[[12]], [[90]]]


@pytest.mark.parametrize("of", [lambda num_read: experts(*range(num_read)), lambda num_read: kept([3])])
def test_a_row_with_a_completion_that_lacks_an_array_has_none(of: Callable[[int], dict[str, Any]]) -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1), ids(3), nats(-1) | of(1))
    builder.add_call(ids(1, 3), ids(4), nats(-1))
    builder.add_call(ids(1, 3, 4), ids(5), nats(-1) | of(3))
    (row,) = builder.transcripts()
    assert row.columns.keys() == {"prompt_tokens", "response_tokens", "response_logprobs"}


NUMBERS: dict[str, Any] = {"dtype": np.dtype(np.float32), "is_nullable": True, "set_by": "sampler"}
OTHERS = {
    "seen": ArrayColumn(name="seen", along="prompt", num_dimensions=1, arrow_type=pa.list_(pa.float32()), **NUMBERS),
    "tries": ArrayColumn(name="tries", along="row", num_dimensions=0, arrow_type=pa.float32(), **NUMBERS),
    "top": ArrayColumn(
        name="top", along="response", num_dimensions=2, fill=-1, arrow_type=pa.list_(pa.list_(pa.float32())), **NUMBERS
    ),
    "noted": ArrayColumn(
        name="noted",
        along="read",
        num_dimensions=2,
        ragged=True,
        arrow_type=pa.list_(pa.list_(pa.float32())),
        **NUMBERS,
    ),
}


def test_an_array_is_joined_by_what_the_catalogue_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript, "array_columns", lambda: OTHERS)
    row = RowBuilder()
    row.add_context(ids(1, 2))
    row.add_completion(
        ids(3),
        {
            "seen": np.array([0.5, 0.25], np.float32),
            "tries": 1.0,
            "top": np.array([[7, 8]], np.float32),
            "noted": Ragged.of([[1], [2, 2]], np.float32),
        },
    )
    row.add_context(ids(4, 5))
    row.add_completion(
        ids(6),
        {
            "seen": np.zeros(5, np.float32),  # its prompt is not that of the row
            "tries": 2.0,
            "top": np.array([[9, 10]], np.float32),
            "noted": Ragged.of([[0], [0], [3], [], [5]], np.float32),
        },
    )
    row.add_context(ids(7))
    columns = row.transcript().columns
    assert (columns["seen"].tolist(), columns["tries"]) == ([0.5, 0.25], 2.0)
    assert columns["top"].tolist() == [[7, 8], [-1, -1], [-1, -1], [9, 10], [-1, -1]]
    assert [each.tolist() for each in columns["noted"]] == [[1], [2, 2], [3], [], [5]]
    row.add_completion(ids(8), {})
    columns = row.transcript().columns  # what is one value for the row stays that of the last completion that gave one
    assert (columns["seen"].tolist(), columns["tries"], columns.keys() & {"top", "noted"}) == ([0.5, 0.25], 2.0, set())
