"""Rows that no step can train on, each with its reason; all others pass."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from strategies import changed, make_batch

from ludic.records import validation
from ludic.records.arrays import values_of
from ludic.records.columns import ArrayColumn, array_columns
from ludic.records.conversion import to_table
from ludic.records.tables import Column
from ludic.records.validation import TRAINED_COLUMNS, find_untrainable

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
        ("kept_tokens", [[5, None]] + [[]] * 15, "holds null, wanted numbers"),
        ("kept_tokens", [None] + [[]] * 15, "holds null, wanted lists of numbers"),
        ("prompt_tokens", None, "is null, wanted list<int32>"),
        ("prompt_tokens", [None] * 8, "holds null, wanted numbers"),
        ("response_tokens", [None, *TOKENS[1:]], "holds null, wanted numbers"),
        ("response_logprobs", [None, *LOGPROBS[1:]], "holds null, wanted numbers"),
        ("response_logprobs", [None], "has 1 tokens, the row says 16"),
        ("response_logprobs", None, "is null, wanted list<float>"),
        ("action_mask", [True] * 15 + [None], "holds null, wanted numbers"),
        ("temperature", None, "is nan, wanted above 0"),
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


# --- Arrays that the catalogue may have, and ludic has not -----------------------------------------------


def column_of(name: str, along: str, num_dimensions: int, type_: pa.DataType, **keys: object) -> ArrayColumn:
    for _ in range(num_dimensions):
        type_ = pa.list_(type_)
    catalogue = {"along": along, "set_by": "sampler", "trained": "always", **keys}
    return ArrayColumn.of(
        Column(name=name, type=type_, nullable=not name.startswith("every"), doc="", catalogue=catalogue)
    )


OTHERS = (
    column_of("teacher", "response", 2, pa.float32(), range=[-9, 9]),
    column_of("layers", "read", 3, pa.int16(), ascending=True),
    column_of("seen", "read", 2, pa.int32(), ragged=True, range=[0, 9]),
    column_of("scene", "row", 2, pa.float32()),
    column_of("sizes", "row", 1, pa.int32()),
    column_of("pace", "row", 0, pa.float32()),
    column_of("every_pace", "row", 0, pa.int32()),
    column_of("every_teacher", "response", 2, pa.bool_()),
    column_of("greedy", "response", 1, pa.bool_(), fill=False),
)
N = 16 + 8 - 1
SOUND = {
    "teacher": [[0.5, 1.0]] * 16,
    "layers": [[[1, 2]] * 3] * N,
    "seen": [[index] * (index % 3) for index in range(9)] + [[]] * (N - 9),
    "scene": [[1.0, 2.0]] * 3,
    "sizes": [4, 5, 6],
    "pace": 0.5,
    "every_pace": 3,
    "every_teacher": [[True, False, True]] * 16,
    "greedy": [False] * 15 + [True],
}


def rows_with(**of_third: object) -> pa.Table:
    """Four rows in two chunks with arrays of OTHERS; the third has these values, the first only those it must have."""
    first = {name: value if name.startswith("every") else None for name, value in SOUND.items()}
    table = rows(**{name: of_third.pop(name) for name in TRAINED_COLUMNS if name in of_third})
    others = [first, SOUND, SOUND | of_third, SOUND]
    for column in OTHERS:
        table = table.append_column(column.name, pa.array([row[column.name] for row in others], column.arrow_type))
    return pa.concat_tables([table.slice(0, 1), table.slice(1)])


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue has OTHERS, too."""
    monkeypatch.setattr(validation, "TRAINED", (*validation.TRAINED, *OTHERS))
    monkeypatch.setattr(validation, "_OTHERS", (*validation._OTHERS, *filter(validation._is_other, OTHERS)))


@pytest.mark.usefixtures("catalogue")
def test_a_truth_of_tokens_that_were_not_sampled_has_to_be_its_fill():
    mask = [True] * 8 + [False] * 7 + [True]
    assert find_untrainable(rows_with(action_mask=mask), VOCABULARY) == {}
    reason = "greedy is True at token 9, and 1 more, wanted False, since action_mask is 0"
    greedy = [False] * 9 + [True] * 2 + [False] * 5
    assert find_untrainable(rows_with(action_mask=mask, greedy=greedy), VOCABULARY) == {2: reason}


@pytest.mark.usefixtures("catalogue")
def test_rows_pass_whose_arrays_have_one_shape_or_are_absent():
    assert find_untrainable(rows_with(), VOCABULARY) == {}
    assert find_untrainable(rows_with(**{name: None for name in SOUND if not name.startswith("every")}), None) == {}
    assert find_untrainable(rows_with().slice(0, 0), None) == {}


UNEVEN = "has lists of unequal lengths, or empty ones"


@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("teacher", [[1.0, 2.0]] * 15 + [[1.0]], UNEVEN),
        ("teacher", [[]] * 16, UNEVEN),
        ("teacher", [[1.0, 2.0]] * 15 + [[]], UNEVEN),
        ("teacher", [[1.0, 2.0]] * 15 + [None], "holds null, wanted lists of numbers"),
        ("teacher", [[1.0, 2.0]] * 15 + [[1.0, None]], "holds null, wanted numbers"),
        ("teacher", [[1.0]] * 16, "has 1 numbers a token, most rows have 2"),
        ("teacher", [], "has 0 tokens, the row says 16"),
        ("teacher", [[1.0, 2.0]] * 15 + [[1.0, np.nan]], "is nan at token 15"),
        ("teacher", [[1.0, 2.0]] * 15 + [[1.0, 10.0]], "is 10.0 at token 15"),
        ("layers", [[[1, 2]] * 2] * N, "has 2 x 2 numbers a token, most rows have 3 x 2"),
        ("layers", [[[1, 2]] * 3] * (N - 1) + [[[1, 2]] * 2], UNEVEN),
        ("layers", [[[1, 2]] * 3] * (N - 1) + [[[1, 2], [1, 2], [1]]], UNEVEN),
        ("layers", [[[1, 2]] * 3] * (N - 1) + [[[1, 2], [1, 2], [2, 1]]], "is 1 at token 22, wanted sorted numbers"),
        ("layers", [[[1, 2]] * 3] * (N - 1) + [[[1, 2], [1, 2], None]], "holds null, wanted lists of numbers"),
        ("seen", [[1]] * (N - 1) + [None], "holds null, wanted lists of numbers"),
        ("seen", [[1]] * (N - 1) + [[None]], "holds null, wanted numbers"),
        ("seen", [[1]] * (N - 1) + [[10]], "is 10 at token 22"),
        ("seen", [[1]], "has 1 tokens, the row says 23"),
        ("scene", [], "is empty, wanted numbers"),
        ("scene", [[1.0, 2.0], [1.0]], UNEVEN),
        ("scene", [[1.0, 2.0]] * 4, "has 4 x 2 numbers in the row, most rows have 3 x 2"),
        ("scene", [[1.0, 2.0]] * 2 + [[np.inf, 0.0]], "is inf, wanted"),
        ("sizes", [1, 2], "has 2 numbers in the row, most rows have 3"),
        ("sizes", [1, 2, None], "holds null, wanted numbers"),
        ("sizes", [], "is empty, wanted numbers"),
        ("pace", np.nan, "is nan, wanted a finite float32"),
        ("every_pace", None, "is null, wanted int32"),
        ("every_teacher", None, "is null, wanted list<list<bool>>"),
        ("every_teacher", [[True, None, True]] * 16, "holds null, wanted numbers"),
        ("every_teacher", [[True]] * 16, "has 1 numbers a token, most rows have 3"),
    ],
)
def test_a_row_whose_array_cant_be_used_is_found_with_its_reason(column: str, value: object, reason: str):
    table = rows_with(**{column: value})
    [(row, found)] = find_untrainable(table, VOCABULARY).items()
    assert (row, found.startswith(f"{column} {reason}")) == (2, True), found
    rest = table.take([0, 1, 3])
    assert find_untrainable(rest, VOCABULARY) == {}
    for each in (*array_columns().values(), *OTHERS):
        if each.name in rest.column_names:
            assert len(values_of(each, rest[each.name])) == 3
