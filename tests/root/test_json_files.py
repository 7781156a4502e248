"""JSON files vouch for their own text; those that older versions or people wrote are read as they are."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.root.json_records import decode_json, encode_json

VALUES = {"version": 3, "name": 'länge \n"quoted"', "config": {"lr": 0.1, "digest": "another"}, "sources": [["w0", 1]]}
KEYS = st.text(min_size=1).filter(lambda key: key != "digest")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values=st.dictionaries(KEYS, JSON, min_size=1, max_size=5), indent=st.sampled_from([2, None]))
def test_values_come_back_and_other_programs_read_them_too(values: dict, indent: int | None) -> None:
    data = encode_json(values, indent=indent)
    assert decode_json(data) == values
    assert {name: value for name, value in json.loads(data).items() if name != "digest"} == values


@pytest.mark.parametrize("indent", [2, None])
def test_each_flipped_bit_is_refused(indent: int | None) -> None:
    data = encode_json(VALUES, indent=indent)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):
            decode_json(bytes(flipped))


def test_a_changed_value_is_told_from_broken_text() -> None:
    data = encode_json({"version": 3})
    assert data.startswith(b'{\n  "version": 3,\n  "digest": "xxh3_64:')
    with pytest.raises(ValueError, match="it does not match its digest"):
        decode_json(data.replace(b"3,", b"2,"))


@pytest.mark.parametrize(
    "text", ['{"version": 3}', '{"version": 3}\n', '{"digest": "xxh3_64:0000000000000000", "version": 3}']
)
def test_a_file_of_an_older_ludic_or_of_another_program_is_read_as_it_is(text: str) -> None:
    assert decode_json(text.encode()) == {"version": 3}


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[]", "it holds a JSON list, wanted an object"), ("", "Expecting value"), ("[" * 100_000, "nested too deep")],
)
def test_text_that_is_no_object_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode_json(text.encode())
