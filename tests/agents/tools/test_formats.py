"""Calls in the formats of the model families, read out of completions."""

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.agents.tools.formats import ParsedCalls, make_tool_format
from ludic.errors import ConfigError

Calls = Sequence[tuple[str, dict[str, Any]]]


def parse(name: str, text: str, *others: str) -> ParsedCalls:
    """The calls in a text. others: names of tools beside go, stop and find; all take any arguments, and a number n."""
    parameters = {"properties": {"n": {"type": "number"}}, "additionalProperties": {}}
    about = [{"name": each, "parameters": parameters} for each in ("go", "stop", "find", *others)]
    return make_tool_format(name).parse(text, [{"type": "function", "function": each} for each in about])


def found(parsed: ParsedCalls) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def in_hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def in_llama(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def in_mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": n, "arguments": a} for n, a in calls], ensure_ascii=False)


def in_new_mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)


def in_json(calls: Calls) -> str:
    return "\n".join(f"```json\n{json.dumps({'name': n, 'arguments': a}, indent=2)}\n```" for n, a in calls)


def in_tags(calls: Calls) -> str:
    return f"<act>{json.dumps([{'name': n, 'arguments': a} for n, a in calls])}</act>"


def in_xml(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n" for key, value in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )


WRITERS = [
    ("qwen3_coder", in_xml),
    ("hermes", in_hermes),
    ("llama", in_llama),
    ("llama", lambda calls: "<|python_tag|>" + in_llama(calls)),
    ("mistral", in_mistral),
    ("mistral", in_new_mistral),
    ("json", in_json),
    ("json:act", in_tags),
]
NAMES = ["qwen3_coder", "hermes", "llama", "mistral", "json", "json:act"]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
a_call = st.tuples(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True), st.dictionaries(st.text(), values, max_size=4)
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "write"), WRITERS)
@settings(max_examples=40)
@given(calls=st.lists(a_call, min_size=1, max_size=4))
def test_calls_as_a_family_writes_them_are_found(name: str, write: Callable[[Calls], str], calls: Calls) -> None:
    if name == "qwen3_coder":  # which has no way to write other names
        calls = [(n, {key: v for key, v in a.items() if re.fullmatch(r"[^<>\s]+", key)}) for n, a in calls]
    parsed = parse(name, write(calls), *(called for called, _ in calls))
    assert found(parsed) == [(called, arguments) for called, arguments in calls]
    assert parsed.feedback is None
    assert len({call.id for call in parsed.calls}) == len(calls)


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "```json", "```"),
    *('{"name": "a", "arguments": {"b": "c"}}', '{"name": "a", "parameters": {}}', '{"name": ', "[", "]", "{", "}"),
    *("<function=a>", "</function>", "<parameter=b>", "</parameter>", "<function=", "<parameter=", ">", "7"),
    *("<act>", "</act>", "a", '"', "\\", "\n", " ", ";", "\ud800", r'"\ud800"', "NaN", "[" * 2000, '{"name":' * 500),
]


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_no_text_raises_and_all_that_is_found_can_be_stored(name: str, text: str) -> None:
    parsed = parse(name, text)
    for call in parsed.calls:
        (call.name + call.arguments + call.id).encode()


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(alphabet="abc ,.\n{}[]"))
def test_text_without_markup_has_no_calls(name: str, text: str) -> None:
    assert parse(name, text) == ParsedCalls(calls=(), rest=text.strip())


def test_a_call_may_stand_between_words() -> None:
    parsed = parse("hermes", 'I look.\n<tool_call>{"name": "find", "arguments": {"q": "猫"}}</tool_call>\nThen I see.')
    (call,) = parsed.calls
    assert (call.id, call.name, call.arguments) == ("call_0", "find", '{"q": "猫"}')
    assert call.result is None
    assert call.error is None


def test_code_may_hold_the_closing_tag_and_line_breaks() -> None:
    parsed = parse("hermes", '<tool_call>{"name": "python", "arguments": {"code": "a\n</tool_call>"}}</tool_call>')
    assert found(parsed) == [("python", {"code": "a\n</tool_call>"})]


def test_a_closing_tag_that_the_end_of_the_text_cut_off_is_not_missed() -> None:
    assert found(parse("hermes", '<tool_call>{"name": "go", "arguments": {}}')) == [("go", {})]


def test_arguments_in_a_string_are_taken_out_of_it() -> None:
    assert found(parse("hermes", r'<tool_call>{"name": "go", "arguments": "{\"n\": 1}"}</tool_call>')) == [
        ("go", {"n": 1})
    ]


@pytest.mark.parametrize(
    ("name", "text", "feedback"),
    [
        ("hermes", '<tool_call>{"name": "go"', "JSON of the call is broken: Expecting ',' delimiter at the end"),
        ("hermes", "<tool_call>go()</tool_call>", "broken: Expecting value at 'go()</tool_call>'"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'has no "name"'),
        ("hermes", '<tool_call>{"name": 7}</tool_call>', 'has no "name"'),
        ("hermes", "<tool_call>[]</tool_call>", "list of calls is empty"),
        ("hermes", "<tool_call>[7]</tool_call>", "a call is a JSON object, not 7"),
        ("hermes", '<tool_call>{"name": "go"}</call>', "comes '</call>' instead of </tool_call>"),
        ("hermes", '<tool_call>{"name": "go", "arguments": {"x": NaN}}</tool_call>', "NaN is not a JSON number"),
        ("hermes", "<tool_call>" + '{"name":' * 5000, "JSON of the call"),
        ("qwen3_coder", "<tool_call>", "after <tool_call> comes the end of the text instead of <function=TOOL>"),
        ("qwen3_coder", '<tool_call>{"name": "go"}', 'comes \'{"name": "go"}\' instead of <function=TOOL>'),
        ("qwen3_coder", "<function=go", "a name and > are missing in '<function=go'"),
        ("qwen3_coder", "<function=>", "a name and > are missing in '<function=>'"),
        ("qwen3_coder", "<function=go>", "in the call of go comes the end of the text instead of <parameter=NAME>"),
        ("qwen3_coder", "<function=go>\nnow</function>", "in the call of go comes 'now</function>' instead of"),
        ("qwen3_coder", "<function=go>\n<parameter=>\n1", "a name and > are missing in '<parameter=>"),
        ("qwen3_coder", "<function=go>\n<parameter=x>\n1", "parameter x of go has no </parameter>"),
        (
            "qwen3_coder",
            "<function=go>\n<parameter=x>\n1\n<parameter=y>\n2\n</parameter>\n</function>",
            "parameter x of go has no </parameter> before '<parameter=y>",
        ),
        (
            "qwen3_coder",
            "<function=go>\n<parameter=x>\n1\n</function>\n</tool_call>",
            "parameter x of go has no </parameter> before '</function>",
        ),
        (
            "qwen3_coder",
            "<function=go>\n<parameter=x>\n1\n</parameter>\n<parameter=x>\n2\n</parameter>\n</function>",
            "parameter x of go is given twice",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=go>\n</function>\n</call>",
            "after the call of go comes '</call>' instead of </tool_call>",
        ),
        ("llama", '{"name": "go", "parameters": {', "broken: Expecting property name"),
        ("llama", "<|python_tag|>go.call(1)", "broken: Expecting value at 'go.call(1)'"),
        ("mistral", "[TOOL_CALLS]go{}", "after [TOOL_CALLS] comes 'go{}'"),
        ("mistral", "[TOOL_CALLS]", "after [TOOL_CALLS] comes the end of the text"),
        ("mistral", "[TOOL_CALLS]go[ARGS]{", "broken: Expecting property name"),
        ("json", '```json\n{"name": }\n```', "broken: Expecting value"),
        ("json:act", "<act>42</act>", "a call is a JSON object, not 42"),
    ],
)
def test_markup_that_cant_be_read_gives_feedback(name: str, text: str, feedback: str) -> None:
    parsed = parse(name, text)
    assert parsed.calls == ()
    assert feedback in (parsed.feedback or "")
    assert "Write each call as " in (parsed.feedback or "")


BROKEN_ONES = {
    "qwen3_coder": ("<tool_call>\n<function=go>\n<parameter=x>\n7\n", "has no </parameter>"),
    "hermes": ('<tool_call>{"name": </tool_call>', "Expecting value"),
    "llama": ('{"name": } ', "Expecting value"),
    "mistral": ("[TOOL_CALLS]go{} ", "after [TOOL_CALLS] comes"),
    "json": ('```json\n{"name": }\n```\n', "Expecting value"),
    "json:act": ('<act>{"name": }</act>', "Expecting value"),
}


@pytest.mark.parametrize(("name", "write"), WRITERS)
@pytest.mark.parametrize("num_broken", [1, 2])
def test_sound_calls_beside_broken_ones_are_found_and_each_problem_is_told_once(
    name: str, write: Callable[[Calls], str], num_broken: int
) -> None:
    broken, problem = BROKEN_ONES[name]
    parsed = parse(name, f"{write([('go', {'n': 1})])}\n{broken * num_broken}{write([('stop', {})])}")
    assert found(parsed) == [("go", {"n": 1}), ("stop", {})]
    assert (parsed.feedback or "").count(problem) == num_broken


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_a_call_of_any_depth_is_read_or_gives_feedback(name: str, write: Callable[[Calls], str]) -> None:
    before, after = write([("go", {"x": "HERE"})]).split('"HERE"')
    for depth in range(100, 1100):
        parsed = parse(name, f"{before}{'[' * depth}{']' * depth}{after}")
        assert len(parsed.calls) == (parsed.feedback is None), depth


@pytest.mark.parametrize(("name", "write"), WRITERS)
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_number_that_json_cant_hold_is_a_problem_of_its_call(
    name: str, write: Callable[[Calls], str], number: str
) -> None:
    parsed = parse(name, write([("go", {"n": "HERE"})]).replace('"HERE"', number) + "\n" + write([("stop", {})]))
    assert found(parsed) == [("stop", {})]
    assert number in (parsed.feedback or "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", '{"name": "Bob", "age": 7}'),
        ("llama", '{"type": "answer", "list": [{"name": "a", "parameters": {}}]}'),
        ("json", '```json\n{"answer": 42}\n```'),
        ("json", "```json\n[1, 2]\n```"),
    ],
)
def test_an_answer_in_json_is_no_call(name: str, text: str) -> None:
    assert parse(name, text) == ParsedCalls(calls=(), rest=text.strip())


def test_llama_may_speak_before_its_call_and_name_the_type_first() -> None:
    parsed = parse("llama", 'Sure. {"type": "function", "name": "go", "parameters": {"n": 1}}')
    assert found(parsed) == [("go", {"n": 1})]


def test_mistral_may_give_ids_of_its_own() -> None:
    parsed = parse("mistral", 'Well.[TOOL_CALLS]go[CALL_ID]x1Y2z3w4v[ARGS]{"n": 1}')
    assert found(parsed) == [("go", {"n": 1})]


@pytest.mark.parametrize("name", NAMES)
def test_a_long_hostile_text_is_read_in_a_moment(name: str) -> None:
    start = time.process_time()
    for piece in ('{"name":', "<tool_call>{", "[TOOL_CALLS]", "```json", "<act>[", '{"a":{"name": 1}', " "):
        parse(name, piece * (100_000 // len(piece)))
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", ["hermess", "json:", "json:a b", "xml:act", ""])
def test_an_unknown_format_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; .*here are hermes, qwen3_coder, mistral, json, json:TAG, "):
        make_tool_format(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'One. <tool_call>{"name": "a"}</tool_call> Two. <tool_call>{"name": "b"}</tool_call> Three.'),
        ("llama", 'One. {"name": "a", "parameters": {}} Two. {"name": "b", "parameters": {}} Three.'),
        ("mistral", 'One. [TOOL_CALLS][{"name": "a"}] Two. [TOOL_CALLS]b[ARGS]{} Three.'),
        ("json", 'One. ```json\n{"name": "a"}\n``` Two. ```json\n{"name": "b"}\n``` Three.'),
    ],
)
def test_the_rest_is_the_text_without_the_calls(name: str, text: str) -> None:
    parsed = parse(name, text)
    assert [call.name for call in parsed.calls] == ["a", "b"]
    assert parsed.rest.split() == ["One.", "Two.", "Three."]
