"""The columns of an example as JSON: whatever the values are, valid, within the limit, and a cut says so."""

import datetime
import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.errors import ConfigError
from ludic.records.example_columns import cut_columns, example_columns, is_json_object
from ludic.run.config import RunConfig


class Broken:
    def __str__(self) -> str:
        raise RuntimeError

    __hash__ = object.__hash__


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
ODD = (Broken(), 10**5000, ENDLESS, nested(2_000), "x" * 5_000, [1] * 3_000)

leaves = st.one_of(
    st.text(st.sampled_from('\ud800"\\\n\0é🐈a')),
    *(st.binary(), st.floats(), st.integers(), st.none(), st.booleans(), st.dates(), st.decimals()),
    st.sampled_from(range(6)).map(lambda index: ODD[index]),  # Hypothesis shows values, and can't show some of these
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text() | st.integers(), inner, max_size=3),
        st.fixed_dictionaries({"cut": inner, "characters": inner}),
        st.fixed_dictionaries({"left_out": inner}),
    ),
    max_leaves=4,
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text() | st.just("__ludic__"), values, max_size=12), st.integers(100, 3_000))
def test_the_text_is_json_within_the_limit_and_can_be_cut_again(columns: dict[str, Any], most: int) -> None:
    text = example_columns(columns, most)
    if not columns:
        assert text is None
        return
    assert text is not None
    assert len(text.encode().decode()) <= most
    found = json.loads(text)
    assert isinstance(found, dict)
    assert is_json_object(text)
    again = example_columns(found, 100)
    assert again is not None
    assert len(again) <= 100
    assert isinstance(json.loads(again), dict)


def test_values_that_json_does_not_have_become_near_ones() -> None:
    columns = {
        "day": datetime.date(2026, 11, 30),
        "price": Decimal("1.50"),
        "raw": b"abc",
        "nan": float("nan"),
        "pair": (1, {2}),
        "numpy": np.float32(1.5),
        "array": np.array([1, 2]),
        "half": "a\ud800",
        "keys": {1: "one"},
        "own": {"broken": Broken(), "kept": 1},
    }
    assert json.loads(example_columns(columns, 2_000) or "") == {
        "day": "2026-11-30",
        "price": "1.50",
        "raw": "YWJj",
        "nan": None,
        "pair": [1, [2]],
        "numpy": 1.5,
        "array": [1, 2],
        "half": "a?",
        "keys": {"1": "one"},
        "own": {"broken": "<Broken>", "kept": 1},
    }


def test_the_longest_values_are_cut_and_say_their_length_also_after_a_second_cut() -> None:
    columns = {"level": "hard", "story": 'ab"' * 1_000, "list": [10] * 1_000, "n": 3}
    first = example_columns(columns, 1_000)
    assert first is not None
    for text in (first, example_columns(json.loads(first), 300)):
        found = json.loads(text or "")
        assert (found["level"], found["n"]) == ("hard", 3)
        assert (found["story"]["characters"], found["list"]["characters"]) == (3_000, len("[10,") + 3 * 998 + 3)
        assert columns["story"].startswith(found["story"]["cut"])
        assert found["list"]["cut"].startswith("[10,10")
    assert 990 < len(first) <= 1_000  # no room is left unused


def test_columns_whose_names_fill_the_room_are_left_out_and_counted_also_after_a_second_cut() -> None:
    columns = {f"column{index}": index for index in range(1_000)}
    first = json.loads(example_columns(columns, 1_000) or "")
    second = json.loads(example_columns(first, 200) or "")
    for found in (first, second):
        left_out = found.pop("__ludic__")["left_out"]
        assert found == {f"column{index}": index for index in range(1_000 - left_out)}
        assert found


def test_the_columns_of_other_programs_are_a_mapping_or_its_text() -> None:
    long = json.dumps({"a": "x" * 200})
    assert cut_columns({"a": 1, 2: "b"}, 100) == '{"a":1,"2":"b"}'
    assert cut_columns('{"a": 1}', 100) == '{"a": 1}'
    assert json.loads(cut_columns(long, 100))["a"]["characters"] == 200
    assert cut_columns('{"a": 1}', 0) is None
    assert cut_columns("[1]", 100) == "[1]"  # which the validation of the row refuses
    assert not is_json_object("[1]")


def test_the_setting_is_0_or_has_room_for_a_note() -> None:
    assert RunConfig(model="m", env=("e",), max_column_characters=0).max_column_characters == 0
    with pytest.raises(ConfigError, match="max_column_characters is 99, wanted 0, which stores none, or at least 100"):
        RunConfig(model="m", env=("e",), max_column_characters=99)
