"""Rows that no step can train on, each with its reason; all others pass."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from strategies import changed, make_batch

from ludic.schema import to_table
from ludic.schema.validation import TRAINED_COLUMNS, find_untrainable

VOCABULARY = 256


def rows(**columns: object) -> pa.Table:
    """Four rows in two chunks, of which the third has these values."""
    table = to_table(make_batch(num_groups=1), run_id="r", sequence=0).select(
        [*TRAINED_COLUMNS, "prompt_length", "response_length"]
    )
    for name, value in columns.items():
        values = table[name].to_pylist()
        column = pa.array([*values[:2], value, *values[3:]], table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return pa.concat_tables([table.slice(0, 1), table.slice(1)])


TOKENS = [5] * 16
LOGPROBS = [-1.0] * 16


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("response_tokens", [*TOKENS[:15], 1_000_000], "is 1000000 at token 15, wanted a token id from 0 to 255"),
        ("response_tokens", [256, *TOKENS[1:]], "is 256 at token 0, wanted a token id from 0 to 255"),
        ("response_tokens", [-1, *TOKENS[1:]], "is -1 at token 0, wanted a token id from 0 to 255"),
        ("prompt_tokens", [2**31 - 1] * 8, "is 2147483647 at token 0, and 7 more, wanted a token id from 0 to 255"),
        ("prompt_tokens", [1, 2], "has 2 tokens, the row says 8"),
        ("response_tokens", TOKENS[1:], "has 15 tokens, the row says 16"),
        ("response_logprobs", LOGPROBS[1:], "has 15 tokens, the row says 16"),
        ("action_mask", [True] * 3, "has 3 tokens, the row says 16"),
        (
            "response_logprobs",
            [5.0, *LOGPROBS[1:]],
            "is 5.0 at token 0, wanted the logarithm of a probability",
        ),
        (
            "response_logprobs",
            [-9999.0, *LOGPROBS[1:]],
            "is -9999.0 at token 0, wanted the logarithm of a probability",
        ),
        ("response_logprobs", [np.nan, *LOGPROBS[1:]], "is nan at token 0, wanted a finite number"),
        ("response_logprobs", [np.inf, *LOGPROBS[1:]], "is inf at token 0, wanted a finite number"),
        ("response_logprobs", [-np.inf, *LOGPROBS[1:]], "is -inf at token 0, wanted a finite number"),
        ("temperature", 0.0, "is 0, wanted above 0; greedy samples can't be trained on"),
        ("temperature", np.nan, "is nan, wanted above 0"),
        ("kept_tokens", [[3, 256]] + [[]] * 15, "at token 0 lacks the sampled token"),
        ("kept_tokens", [[]] * 3, "has 3 tokens, the row says 16"),
    ],
)
def test_a_row_that_would_end_a_step_is_found_with_its_reason(column, value, reason):
    table = rows(**{column: value})
    [(row, found)] = find_untrainable(table, VOCABULARY).items()
    assert (row, found.startswith(f"{column} {reason}")) == (2, True), found


def test_training_always_reads_these_arrays_and_experts_only_if_they_are_replayed():
    arrays = ("prompt_tokens", "response_tokens", "response_logprobs", "action_mask", "kept_tokens")
    assert list(TRAINED_COLUMNS) == ["temperature", *arrays]


def test_kept_tokens_may_be_left_out_at_a_token_and_have_to_be_token_ids():
    table = rows(response_tokens=TOKENS, kept_tokens=[[4, 5]] + [[]] * 15)
    assert find_untrainable(table, VOCABULARY) == {}
    table = rows(response_tokens=TOKENS, kept_tokens=[[5, 256]] + [[]] * 15)
    assert find_untrainable(table, VOCABULARY) == {2: "kept_tokens is 256 at token 0, wanted a token id from 0 to 255"}


def test_rows_of_a_worker_pass_also_if_no_model_is_known():
    assert find_untrainable(rows(), VOCABULARY) == {}
    assert find_untrainable(rows(response_tokens=[2**31 - 1] * 16), None) == {}
    assert find_untrainable(rows().slice(0, 0), None) == {}


def test_a_failed_row_without_a_response_passes():
    batch = make_batch(num_groups=1)
    empty = dict.fromkeys(("response_logprobs", "token_rewards"), np.zeros(0, np.float32))
    group = batch.groups[0]
    failed = changed(
        group.rollouts[0], error="x", response_tokens=np.zeros(0, np.int32), agent_steps=(), action_mask=None, **empty
    )
    group = replace(group, rollouts=(failed, *group.rollouts[1:]))
    assert find_untrainable(to_table(replace(batch, groups=(group,)), run_id="r", sequence=0), VOCABULARY) == {}


def test_any_finite_logprob_passes_if_it_is_asked_for():
    table = rows(response_logprobs=[5.0, -9999.0, *LOGPROBS[2:]])
    assert find_untrainable(table, VOCABULARY, any_logprob=True) == {}
    for value in (np.nan, np.inf, -np.inf):
        table = rows(response_logprobs=[value, *LOGPROBS[1:]])
        assert list(find_untrainable(table, VOCABULARY, any_logprob=True)) == [2]
