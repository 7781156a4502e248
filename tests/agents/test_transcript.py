"""Token transcripts from model calls: masks, logprobs, forks, and storage that grows by what is new."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents.transcript import RowBuilder, Span, TranscriptBuilder


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def nats(*logprobs: float) -> np.ndarray:
    return np.array(logprobs, dtype=np.float32)


def test_one_call_is_a_row_without_a_mask() -> None:
    builder = TranscriptBuilder()
    assert builder.transcripts() == ()
    assert builder.add_call(ids(1, 2), ids(3, 4, 5), nats(-1, -2, -3)) == Span(segment_index=0, start=0, end=3)
    (row,) = builder.transcripts()
    assert (row.prompt_tokens.tolist(), row.response_tokens.tolist()) == ([1, 2], [3, 4, 5])
    assert (row.response_logprobs.tolist(), row.action_mask, row.has_logprobs) == ([-1, -2, -3], None, True)
    assert (row.segment_index, row.parent_segment_index) == (0, None)
    assert (row.prompt_tokens.dtype, row.response_tokens.dtype, row.response_logprobs.dtype) == ("i4", "i4", "f4")


def test_a_later_call_adds_what_its_prompt_adds_and_its_completion() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1, 2), ids(3, 4), nats(-1, -2))
    # The prompt is 1 2, the completion 3 4, and a tool's result 5 6 7.
    assert builder.add_call(ids(1, 2, 3, 4, 5, 6, 7), ids(8), nats(-4)) == Span(segment_index=0, start=5, end=6)
    (row,) = builder.transcripts()
    assert row.prompt_tokens.tolist() == [1, 2]
    assert row.response_tokens.tolist() == [3, 4, 5, 6, 7, 8]
    assert row.action_mask is not None
    assert row.action_mask.tolist() == [True, True, False, False, False, True]
    assert row.response_logprobs.tolist() == [-1, -2, 0, 0, 0, -4]


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
    assert builder.add_call(prompt, ids(8), nats(-4)) == Span(segment_index=1, start=0, end=1)
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
    assert (row.has_logprobs, row.response_logprobs.tolist()) == (False, [0.0, 0.0])


def test_tokens_of_a_known_row_are_added_in_order() -> None:
    row = RowBuilder(segment_index=3)
    row.add_context(ids(1))
    row.add_context(ids(2))
    assert row.add_completion(ids(3, 4), nats(-1, -2)) == Span(segment_index=3, start=0, end=2)
    row.add_context(ids(5))
    transcript = row.transcript(2)
    assert (transcript.prompt_tokens.tolist(), transcript.response_tokens.tolist()) == ([1, 2], [3, 4, 5])
    assert transcript.action_mask is not None
    assert transcript.action_mask.tolist() == [True, True, False]
    assert (transcript.segment_index, transcript.parent_segment_index) == (3, 2)


def test_a_row_without_a_completion_is_a_prompt() -> None:
    row = RowBuilder()
    row.add_context(ids(1, 2))
    transcript = row.transcript()
    assert (transcript.prompt_tokens.tolist(), len(transcript.response_tokens)) == ([1, 2], 0)
    assert (transcript.response_tokens.dtype, transcript.response_logprobs.dtype) == ("i4", "f4")


def test_a_completion_needs_a_logprob_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 tokens and 1 logprobs"):
        TranscriptBuilder().add_call(ids(1), ids(2, 3), nats(-1))


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
        assert row.response_logprobs[span.start : span.end].tolist() == logprobs
    sampled = [np.ones(len(row.response_tokens), bool) if row.action_mask is None else row.action_mask for row in rows]
    assert sum(int(mask.sum()) for mask in sampled) == sum(len(completion) for _, _, completion, _ in calls)
    assert all(not row.response_logprobs[~mask].any() for row, mask in zip(rows, sampled, strict=True))
    num_stored = sum(len(row.prompt_tokens) + len(row.response_tokens) for row in rows)
    assert num_stored <= sum(len(suffix) + len(completion) for _, suffix, completion in turns)
    assert [row.segment_index for row in rows] == list(range(len(rows)))
    assert all(row.parent_segment_index < row.segment_index for row in rows[1:])  # type: ignore[operator]


def test_kept_tokens_are_empty_at_tokens_that_were_not_sampled() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1, 2), ids(3, 4), nats(-1, -2), (ids(3, 9), ids(4)))
    builder.add_call(ids(1, 2, 3, 4, 5), ids(8), nats(-4), (ids(7, 8),))
    (row,) = builder.transcripts()
    assert row.kept_tokens is not None
    assert [kept.tolist() for kept in row.kept_tokens] == [[3, 9], [4], [], [7, 8]]


def experts(*numbers: int) -> np.ndarray:
    """One expert in one layer, for each token that was read."""
    return np.array(numbers, np.int16)[:, None, None]


def test_experts_are_of_each_token_that_was_read_when_it_was_read_first() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1, 2), ids(3, 4), experts=experts(10, 20, 30))
    # A tool's result is 5. The call reads all again, with other experts: weights may have changed in between.
    builder.add_call(ids(1, 2, 3, 4, 5), ids(6, 7), experts=experts(11, 21, 31, 40, 50, 60))
    builder.add_call(ids(1, 9), ids(6), experts=experts(12, 90))
    first, second = builder.transcripts()
    assert first.experts is not None
    assert first.experts.tolist() == experts(10, 20, 30, 40, 50, 60).tolist()
    assert second.experts is not None
    assert second.experts.tolist() == experts(12, 90).tolist()


def test_a_row_with_a_completion_that_lacks_its_experts_has_none() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1), ids(3), experts=experts(10))
    builder.add_call(ids(1, 3), ids(4))
    builder.add_call(ids(1, 3, 4), ids(5), experts=experts(10, 30, 40))
    (row,) = builder.transcripts()
    assert row.experts is None


def test_a_row_with_a_completion_that_lacks_its_kept_tokens_has_none() -> None:
    builder = TranscriptBuilder()
    builder.add_call(ids(1), ids(3), nats(-1), (ids(3, 9),))
    builder.add_call(ids(1, 3, 5), ids(8), nats(-4))
    (row,) = builder.transcripts()
    assert row.kept_tokens is None
