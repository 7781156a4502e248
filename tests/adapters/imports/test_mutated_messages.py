"""A record of another program that is changed gives the same tokens, or is refused by the name of the field.

Each record is changed in one place: a field is added, a value gets another type, fields or results of tools change
their order. With each chat template the outcome is the same tokens and mask, a refusal that names the field, or, for a
field that nothing knows, its name in the count of fields that are not used.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from chat_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from ludic.adapters.imports.episodes import HIDDEN_REASONING, ImportedRow, rows_of
from ludic.adapters.imports.formats import jsonl
from ludic.adapters.imports.records import ImportRecord
from ludic.errors import ModelError, RefusedRecordError


def _call(id_: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _used(id_: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def _result(id_: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content}


_ASKED = {"role": "user", "content": "Weather in 北京 and Köln?"}
_IDS = ("abcdefgh1", "abcdefgh2")  # as Mistral's template wants them
RECORDS: dict[str, list[dict[str, Any]]] = {
    "OpenAI chat": [
        {"role": "system", "content": "Be brief."},
        _ASKED,
        {"role": "assistant", "content": "Sun."},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "tomorrow?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Rain."}]},
    ],
    "OpenAI tools": [
        {"role": "developer", "content": "Be brief."},
        _ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [_call(_IDS[0], "look", '{"city": "北京"}'), _call(_IDS[1], "look", {"city": "Köln"})],
        },
        {"role": "tool", "tool_call_id": _IDS[0], "content": "sun"},
        {"role": "tool", "tool_call_id": _IDS[1], "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "Sun and rain."},
    ],
    "OpenAI fine-tuning": [
        _ASKED,
        {"role": "assistant", "content": "Fog.", "weight": 0},
        {"role": "user", "content": "Are you sure?"},
        {"role": "assistant", "content": "Sun.", "weight": 1},
    ],
    "OpenAI refusal": [_ASKED, {"role": "assistant", "content": None, "refusal": "I can't say."}],
    "function_call": [
        _ASKED,
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"city": "北京"}'}},
        {"role": "function", "name": "look", "content": "sun"},
        {"role": "assistant", "content": "Sun."},
    ],
    "reasoning_content": [
        _ASKED,
        {"role": "assistant", "reasoning_content": "Two cities.", "content": "Sun."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "reasoning_content": "I am.", "content": "Yes."},
    ],
    "Anthropic": [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look."},
                _used(_IDS[0], "look", city="北京"),
                _used(_IDS[1], "look", city="Köln"),
            ],
        },
        {"role": "user", "content": [_result(_IDS[0], "sun"), _result(_IDS[1], [{"type": "text", "text": "rain"}])]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Both."}, {"type": "text", "text": "Done."}],
        },
    ],
    "verifiers": [
        _ASKED,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": _IDS[0], "name": "look", "arguments": '{"city": "北京"}'}],
        },
        {"role": "tool", "tool_call_id": _IDS[0], "name": "look", "content": "sun"},
        {"role": "assistant", "content": "Sun.", "reasoning_content": "So it is."},
    ],
    "ART": [
        {**_ASKED, "trainable": False},
        {"role": "assistant", "content": "Fog.", "trainable": False},
        {"role": "user", "content": "Sure?", "trainable": False},
        {"role": "assistant", "content": "Sun.", "trainable": True, "tool_calls": None},
    ],
}
_LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@cache
def _tokenizer(family: str) -> PreTrainedTokenizerBase:
    return FAMILIES[family].tokenizer()


@dataclass(frozen=True)
class Outcome:
    """What becomes of a record: tokens and mask of each row with the unused fields, or why it is refused."""

    rows: tuple[tuple[bytes, bytes, bytes], ...] = ()
    unread: Mapping[str, int] = ()  # type: ignore[assignment]
    refusal: str = ""


def outcome(messages: Sequence[Mapping[str, Any]], family: str) -> Outcome:
    tools = {"tools": [_LOOK]} if FAMILIES[family].has_tools else {}
    # As a file has it.
    record = ImportRecord(json.loads(json.dumps({"messages": messages, **tools})))
    tokenizer = _tokenizer(family)
    stops = FAMILIES[family].stop_tokens(tokenizer)
    try:
        (rows,) = rows_of([jsonl(record)], lambda: tokenizer, lambda: stops)
    except (RefusedRecordError, ModelError) as error:
        return Outcome(refusal=str(error))
    if isinstance(rows, Exception):
        assert isinstance(rows, RefusedRecordError), repr(rows)
        return Outcome(refusal=str(rows))
    unread = {name: number for row in rows for name, number in row.unread.items()}
    unread.pop(HIDDEN_REASONING, None)
    return Outcome(tuple(map(_tokens, rows)), unread)


def _tokens(row: ImportedRow) -> tuple[bytes, bytes, bytes]:
    mask = b"" if row.action_mask is None else row.action_mask.tobytes()
    return row.prompt_tokens.tobytes(), row.response_tokens.tobytes(), mask


@cache
def base(name: str, family: str) -> Outcome:
    return outcome(RECORDS[name], family)


USABLE = [(name, family) for family in FAMILIES for name in RECORDS]


def test_each_record_is_used_with_some_template_and_each_template_uses_some() -> None:
    used = [(name, family) for name, family in USABLE if base(name, family).rows]
    assert {name for name, _ in used} == {*RECORDS}
    assert {family for _, family in used} == {*FAMILIES}
    assert all(base(name, family).unread == {} for name, family in used)
    # Where a template shows no thinking or no tools, that is the reason.
    refused = [base(*each).refusal for each in USABLE if not base(*each).rows]
    assert len(used) > 2 * len(refused)


# --- Places in a record ----------------------------------------------------------------------------------------------

Path = tuple[str | int, ...]
_ARGUMENTS = ("arguments", "input")


def _places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each value in a record with the way to it; what arguments hold is the user's own."""
    if path:
        yield path, value
    if path and path[-1] in _ARGUMENTS:
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from _places(each, (*path, key))


def _changed(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy in which the value at the end of a way is another."""
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else [*value]
    copy[path[0]] = _changed(value[path[0]], path[1:], change)  # type: ignore[index]
    return copy


@st.composite
def places(draw: st.DrawFn, wanted: Callable[[Path, Any], bool]) -> tuple[str, Path, Any]:
    """A record, and a place in it that is wanted."""
    found = [(name, *place) for name, record in RECORDS.items() for place in _places(record) if wanted(*place)]
    return draw(st.sampled_from(found))


families = st.sampled_from([*FAMILIES])
_KNOWN_ELSEWHERE = [
    *("cache_control", "annotations", "audio", "logprobs", "tool_plan", "channel", "thinking_blocks", "index"),
    *("reasoning_details", "function", "model", "is_error", "citations", "signature", "end_turn", "recipient"),
]
_VALUES = st.sampled_from(["x", 5, 0.5, True, False, ["x"], [{"a": 1}], {"a": 1}, "", 0])


@settings(max_examples=300)
@given(
    place=places(lambda path, value: isinstance(value, dict) and path[-1] not in _ARGUMENTS),
    name=st.one_of(st.sampled_from(_KNOWN_ELSEWHERE), st.text(min_size=1, max_size=3).map("x_{}".format)),
    value=_VALUES,
    family=families,
)
def test_a_field_that_is_added_is_counted_or_refused_by_its_name(
    place: tuple[str, Path, Any], name: str, value: Any, family: str
) -> None:
    record, path, found = place
    if name in found or (name == "function" and "arguments" in found):
        return
    result = outcome(_changed(RECORDS[record], path, lambda each: {**each, name: value}), family)
    before = base(record, family)
    if result.refusal != before.refusal:
        assert name in result.refusal
    elif not result.refusal:
        assert result.rows == before.rows
        (counted,) = result.unread
        assert counted.endswith(name)


_MAY_BE: dict[str, tuple[type, ...]] = {
    "content": (str,),
    "arguments": (dict, str),
    "input": (dict,),
    "weight": (bool,),
    "trainable": (int,),
    "refusal": (str,),
}
"""More types that a field may have."""


@settings(max_examples=400)
@given(
    place=places(lambda path, value: not isinstance(path[-1], int)),
    value=st.sampled_from([5, 1.5, True, {"a": 1}, ["x"], [5], "x", "", [{"type": "image_url"}]]),
    family=families,
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(
    place: tuple[str, Path, Any], value: Any, family: str
) -> None:
    record, path, found = place
    if type(found) is type(value) or isinstance(value, _MAY_BE.get(str(path[-1]), ())):
        return  # another value, and not another type
    before, result = base(record, family), outcome(_changed(RECORDS[record], path, lambda _: value), family)
    if result.refusal:
        names = [str(key) for key in path if not isinstance(key, int)]
        assert result.refusal == before.refusal or any(name in result.refusal for name in names)
    else:
        # 1 and true are one mark
        assert (result.rows, result.unread) == (before.rows, {})


def _shuffled(draw: st.DrawFn, value: Any) -> Any:
    """A copy whose objects have their fields in another order."""
    if isinstance(value, list):
        return [_shuffled(draw, each) for each in value]
    if not isinstance(value, dict):
        return value
    names = draw(st.permutations([*value]))
    return {name: value[name] if name in _ARGUMENTS else _shuffled(draw, value[name]) for name in names}


def _with_nulls(draw: st.DrawFn, value: Any) -> Any:
    """A copy whose objects have more fields, which are null, as Arrow gives them."""
    if isinstance(value, list):
        return [_with_nulls(draw, each) for each in value]
    if not isinstance(value, dict):
        return value
    names = draw(st.sets(st.sampled_from(["tool_calls", "name", "weight", "refusal", "reasoning", "function", "x"])))
    rest = {name: each if name in _ARGUMENTS else _with_nulls(draw, each) for name, each in value.items()}
    return {**dict.fromkeys(names), **rest}


def _with_results_elsewhere(draw: st.DrawFn, messages: list[dict[str, Any]]) -> list[Any]:
    """A copy whose results of tools, messages or parts, change places among themselves."""
    copy = deepcopy(messages)
    rows = [index for index, each in enumerate(copy) if "tool_call_id" in each]
    for index, other in zip(rows, draw(st.permutations(rows)), strict=True):
        copy[index] = messages[other]
    for each in copy:
        if isinstance(each["content"], list) and all(part["type"] == "tool_result" for part in each["content"]):
            each["content"] = draw(st.permutations(each["content"]))
    return copy


def _in_other_types(draw: st.DrawFn, messages: list[dict[str, Any]]) -> list[Any]:
    """A copy with texts as parts, arguments as objects or text, and calls as JSON text."""
    copy = deepcopy(messages)
    for each in copy:
        if isinstance(each["content"], str) and draw(st.booleans()):
            each["content"] = [{"type": "text", "text": each["content"]}]
        for call in each.get("tool_calls") or ():
            function = call.get("function", call)
            if draw(st.booleans()):
                is_text = isinstance(function["arguments"], str)
                function["arguments"] = (json.loads if is_text else json.dumps)(function["arguments"])
        if each.get("tool_calls") and draw(st.booleans()):
            each["tool_calls"] = json.dumps(each["tool_calls"])
    return copy


@pytest.mark.parametrize("change", [_shuffled, _with_nulls, _with_results_elsewhere, _in_other_types])
@settings(max_examples=100)
@given(data=st.data(), name=st.sampled_from([*RECORDS]), family=families)
def test_another_spelling_of_a_record_gives_the_same_tokens(
    change: Callable[[st.DrawFn, Any], Any], data: st.DataObject, name: str, family: str
) -> None:
    assert outcome(change(data.draw, RECORDS[name]), family) == base(name, family)
