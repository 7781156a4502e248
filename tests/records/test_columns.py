"""What follows from a column's row of the catalogue, for kinds of columns that ludic has and that it may get."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ludic.records.arrays import values_of
from ludic.records.columns import ArrayColumn, Ragged, array_columns, reasons_against
from ludic.records.tables import Column, _parse_type


def column(type_: Any, **keys: Any) -> ArrayColumn:
    row = {"set_by": "sampler", **keys}
    return ArrayColumn.of(Column(name="new", type=_parse_type(type_), nullable=True, doc="", catalogue=row))


NUMBER = column({"list": "float"}, along="response", fill=0, range=[0, 10])
FLAG = column({"list": "bool"}, along="response", fill=False)
PROMPT = column({"list": "int32"}, along="prompt", null=-7)
READ = column({"list": {"list": "int32"}}, along="read", ragged=True, range=[0, 9])
OF_ROW = column("int32", along="row")
ROW_FLAG = column("bool", along="row")
ROW_NUMBER = column("float", along="row", range=[0, 1])


def test_lists_are_joined_without_a_change_of_their_numbers():
    lists = Ragged.of([[1, 2], [], np.array([3])], np.int32)
    assert [each.tolist() for each in lists] == [[1, 2], [], [3]]
    assert (len(lists), lists.shape, lists.counts.tolist(), lists.nbytes) == (3, (3,), [2, 0, 1], 12)
    assert [each.tolist() for each in lists[1:]] == [[], [3]]
    assert lists[-1].tolist() == [3]


@pytest.mark.parametrize("lists", [[[1.7]], [np.array([2**32 + 5])], [[1], [np.nan]]])
def test_numbers_that_the_dtype_does_not_have_are_refused(lists):
    with (
        pytest.raises(ValueError, match="a list holds numbers that int32 can't represent"),
        np.errstate(invalid="ignore"),
    ):
        Ragged.of(lists, np.int32)


def test_a_slice_of_lists_has_no_step():
    with pytest.raises(ValueError, match="has step 2, wanted 1"):
        Ragged.of([[1], [2]], np.int32)[::2]


@pytest.mark.parametrize(
    ("of", "values", "reason"),
    [
        (OF_ROW, 0.5, "is float, wanted one int32"),
        (OF_ROW, True, "is bool, wanted one int32"),
        (OF_ROW, np.int64(5), None),
        (ROW_FLAG, 1, "is int, wanted one bool"),
        (ROW_FLAG, np.True_, None),
        (ROW_NUMBER, "fast", "is str, wanted one float32"),
        (ROW_NUMBER, 1, None),
        (NUMBER, np.zeros(2), "is float64 of shape (2,), wanted a NumPy array of float32 of one dimension"),
        (NUMBER, [0.0], "is list, wanted a NumPy array of float32 of one dimension"),
        (READ, np.zeros(2, np.int32), "is ndarray, wanted a Ragged of int32"),
    ],
)
def test_values_of_another_type_are_named(of, values, reason):
    assert of.misfit(values) == reason
    assert of.fit_all([values], [1], [2]) is False or reason is None


@pytest.mark.parametrize(
    ("of", "values", "reason"),
    [
        (OF_ROW, 2**31, f"is {2**31}, wanted a finite int32"),
        (ROW_NUMBER, 1.5, "is 1.5, wanted 0 to 1"),
        (ROW_NUMBER, float("nan"), "is nan, wanted 0 to 1"),
        (NUMBER, np.array([1, np.nan, 11], np.float32), "is nan at token 1, and 1 more, wanted 0 to 10"),
        (READ, Ragged.of([[1], [], [2, 10]], np.int32), "is 10 at token 2, wanted 0 to 9"),
        (replace(READ, ascending=True), Ragged.of([[2], [1, 3]], np.int32), None),
        (
            replace(READ, ascending=True),
            Ragged.of([[2], [3, 3]], np.int32),
            "is 3 at token 1, wanted sorted numbers, each",
        ),
    ],
)
def test_numbers_out_of_range_are_named_with_their_token(of, values, reason):
    found = of.bad_numbers(values)
    assert (found is None) if reason is None else found.startswith(reason)


def test_a_value_of_a_token_that_was_not_sampled_is_the_fill():
    is_sampled = np.array([True, False, False])
    assert NUMBER.not_filled(np.array([1, 0, 0], np.float32), is_sampled) is None
    reason = NUMBER.not_filled(np.array([1, 2, 3], np.float32), is_sampled)
    assert reason == "is 2.0 at token 1, and 1 more, wanted 0, since action_mask is 0"
    assert FLAG.not_filled(np.array([True, False, False]), is_sampled) is None
    assert FLAG.not_filled(np.array([True, False, True]), is_sampled) == (
        "is True at token 2, wanted False, since action_mask is 0"
    )


def test_a_cut_keeps_the_values_of_the_tokens_that_are_left():
    # A prompt of 2 tokens and a response of 3, cut to its tokens 1 to 2.
    assert NUMBER.cut(np.array([1, 2, 3], np.float32), 2, 1, 2).tolist() == [2]
    assert PROMPT.cut(np.array([5, 6], np.int32), 2, 1, 2).tolist() == [5, 6, -7]
    assert [each.tolist() for each in READ.cut(Ragged.of([[1], [2], [3], [4]], np.int32), 2, 1, 2)] == [[1], [2], [3]]
    assert OF_ROW.cut(4, 2, 1, 2) == 4


@pytest.mark.parametrize("inner", ["int16", "bool"])
def test_a_row_of_several_dimensions_that_holds_a_null_or_is_uneven_has_no_elements(inner):
    of = column({"list": {"list": inner}}, along="response")
    one, none = (True, False) if inner == "bool" else (1, 0)
    rows = [[[none, one], [one, one]], [[one, None]], None, [[one], [one, none]], [[one, one]]]
    type_ = pa.list_(pa.list_(of.arrow_type.value_type.value_type))
    found = values_of(of, pa.chunked_array([pa.array(rows, type_)]))
    assert [None if each is None else each.tolist() for each in found] == [rows[0], [], None, [], rows[4]]


def test_an_absent_array_is_none_or_left_out():
    names = ("kept_tokens", "experts")
    assert list(reasons_against(dict.fromkeys(names), 1, 1)) == []
    assert dict(reasons_against({"spell": np.zeros(1), 5: 1}, 1, 1)).keys() == {"spell", "5"}


@pytest.mark.parametrize(
    ("type_", "keys", "problem"),
    [
        ({"list": "float"}, {"along": "respnse"}, "runs along respnse"),
        ("float", {"along": "response"}, "wanted a list"),
        ({"list": "int32"}, {"along": "response", "ragged": True}, "wanted a list of numbers a token"),
        ({"list": "int32"}, {"along": "response", "holds_token": True}, "wanted ragged and along the response"),
        ({"list": "float"}, {"along": "response", "colour": "red"}, "wanted fields of ArrayColumn"),
    ],
)
def test_a_row_of_the_catalogue_that_makes_no_sense_is_refused(type_, keys, problem):
    with pytest.raises(AssertionError, match=problem):
        column(type_, **keys)


def test_the_catalogue_has_the_arrays_in_the_order_of_the_table():
    assert [each.along for each in array_columns().values()] == ["prompt", *["response"] * 5, "read"]
