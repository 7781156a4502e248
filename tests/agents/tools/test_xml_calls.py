"""Calls of Qwen3-Coder and Qwen 3.5: typed by the tool's schema, told by the template, run, and rendered the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from call_templates import FORMATS, GLM, QWEN3_CODER, tokenizer_with
from gateway.scripted import ScriptedEngine
from jsonschema import Draft202012Validator

import ludic
from ludic.agents.agent import Agent
from ludic.agents.tools.formats import format_of_template, make_tool_format
from ludic.agents.tools.registry import make_tools
from ludic.models.chat import render_text
from ludic.records.rollout import Message, RolloutBatch, ToolCall
from ludic.rollouts.sampler import GroupSampler, episodes_of_run, make_environments
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.settings.kinds import TOOL_FORMAT

SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "string"}},
    "object": {"type": "object"},
    "nothing": {"type": "null"},
    "maybe": {"type": ["string", "null"]},
    "nullable": {"type": "string", "nullable": True},
    "text_or_integer": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "number_or_text": {"oneOf": [{"type": "number"}, {"type": "string"}]},
    "word": {"enum": ["1", "two"]},
    "code": {"enum": [1, 2]},
    "same": {"const": True},
    "any": {},
    "elsewhere": {"$ref": "#/$defs/x"},
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": SCHEMAS}}}


def written(**values: str) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=look>\n{parameters}</function>\n</tool_call>"


def read(text: str) -> Any:
    parsed = make_tool_format("qwen3_coder").parse(text, [TOOL])
    assert parsed.feedback is None
    (call,) = parsed.calls
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("text", each, each) for each in ("cats", "7", "true", "null", '{"a": 1}', "", " a ", "\n", "a\nb", '"q"')),
        *(("integer", "7", 7), ("integer", " 7 ", 7), ("integer", "7.5", 7.5), ("number", "1e3", 1000.0)),
        *(("flag", "true", True), ("flag", "True", True), ("flag", "False", False)),
        *(("list", '["a", "b"]', ["a", "b"]), ("object", '{"a": {"b": null}}', {"a": {"b": None}})),
        *(("nothing", "null", None), ("nothing", "None", None), ("maybe", "None", None), ("maybe", "7", "7")),
        *(("nullable", "null", None), ("nullable", "nulls", "nulls")),
        *(("text_or_integer", "7", 7), ("text_or_integer", "7a", "7a"), ("text_or_integer", "[7]", "[7]")),
        *(("number_or_text", "7", 7), ("number_or_text", "true", "true")),
        *(("word", "1", "1"), ("code", "1", 1), ("same", "true", True)),
        *(("any", "7", 7), ("any", "seven", "seven"), ("elsewhere", '{"a": 1}', {"a": 1})),
        ("unknown", "7", "7"),
        ("object", '{"code": "a\nb"}', {"code": "a\nb"}),
    ],
)
def test_a_value_has_the_type_of_its_schema(name: str, text: str, value: Any) -> None:
    found = read(written(**{name: text}))[name]
    assert (found, type(found)) == (value, type(value))


VALUES = ["cats", "two\nlines", " a ", 7, 0.5, True, False, None, ["a", "7"], {"a": [1, None]}, [], "1", 1]


@pytest.mark.parametrize("name", [*SCHEMAS])
def test_what_the_template_writes_is_read_back_the_same(name: str) -> None:
    tokenizer = tokenizer_with(QWEN3_CODER)
    validator = Draft202012Validator({key: value for key, value in SCHEMAS[name].items() if key != "$ref"})
    fitting = [each for each in VALUES if validator.is_valid(each)]
    if name in ("any", "elsewhere", "text_or_integer", "number_or_text"):
        fitting.remove("1")  # which is written as the number is
    assert fitting
    for value in fitting:
        call = ToolCall(id="call_0", name="look", arguments=json.dumps({name: value}))
        answer = Message(role="assistant", content="", tool_calls=(call,))
        assert read(render_text(tokenizer, [answer], add_generation_prompt=False)) == {name: value}


@pytest.mark.parametrize(
    "value",
    [
        "a </parameter> b",
        "a </parameter>\nb",
        "a <parameter=b> </function> <tool_call> <function=c>",
        "  </function>\n </parameter> x\n\t<parameter=b>",
        "</function> # at the begin of a line, and not the end\nof the call",
        "<a>\n</a>",
    ],
)
def test_a_tag_in_a_value_is_part_of_it(value: str) -> None:
    assert read(written(text=value, integer="1")) == {"text": value, "integer": 1}


@pytest.mark.parametrize(
    "text",
    [
        "<function=look>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
        "<function=look>\n<parameter=text>\na\n</parameter>\n</function>",
        "<tool_call>\n<function=look>\n<parameter=text>\na\n</parameter>\n</function>",
        "<tool_call><function=look><parameter=text>a</parameter></function></tool_call>",
        "<tool_call> <function=look> <parameter= text >\na</parameter> </function> </tool_call>",
    ],
)
def test_tags_that_models_leave_out_and_lines_are_not_missed(text: str) -> None:
    assert read(text) == {"text": "a"}


def test_several_calls_and_words_around_them() -> None:
    text = f"I look.\n{written(text='a')}\n{written(integer='1')}\nThen I see."
    parsed = make_tool_format("qwen3_coder").parse(text, [TOOL])
    assert [json.loads(call.arguments) for call in parsed.calls] == [{"text": "a"}, {"integer": 1}]
    assert (parsed.rest, parsed.feedback) == ("I look.\n\n\nThen I see.", None)
    both = written(text="a").removesuffix("</tool_call>") + written(integer="1").removeprefix("<tool_call>\n")
    assert len(make_tool_format("qwen3_coder").parse(both, [TOOL]).calls) == 2


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"integer": "seven"}, "parameter integer of look is 'seven', wanted integer as JSON"),
        ({"list": "['a']"}, "parameter list of look is \"['a']\", wanted array as JSON"),
        ({"code": "one"}, "parameter code of look is 'one', wanted integer as JSON"),
        ({"number": "1e999"}, "parameter number of look is '1e999', wanted number as JSON"),
        ({"object": "[" * 100_000}, "parameter object of look is nested too deeply"),
    ],
)
def test_a_value_that_is_none_of_its_type_gives_feedback(values: dict[str, str], problem: str) -> None:
    parsed = make_tool_format("qwen3_coder").parse(written(**values), [TOOL])
    assert (parsed.calls, problem in (parsed.feedback or "")) == ((), True)


@pytest.mark.parametrize(
    "tool",
    [
        {"function": None},
        {"function": {"name": "look", "parameters": None}},
        {"function": {"name": "look", "parameters": []}},
        {"function": {"name": "look", "parameters": {"properties": [1]}}},
        {"function": {"name": "look", "parameters": {"properties": {"a": "text"}}}},
        {"function": {"name": "look", "parameters": {"properties": {"a": {"type": {"b": 1}}}}}},
        {"function": {"name": "look", "parameters": {"properties": {"a": {"anyOf": 7, "enum": "x"}}}}},
    ],
)
def test_a_tool_with_an_odd_schema_raises_nothing(tool: dict[str, Any]) -> None:
    assert len(make_tool_format("qwen3_coder").parse(written(a="cats"), [tool]).calls) == 1


# --- Told by the template --------------------------------------------------------------------------------


@pytest.mark.parametrize("template", FORMATS)
def test_the_template_tells_the_format(template: str) -> None:
    assert format_of_template(tokenizer_with(template)) == FORMATS[template]


def test_each_format_with_markup_is_told_by_a_template() -> None:
    assert {name for name in FORMATS.values() if name is not None} == {*TOOL_FORMAT.names()} - {"json", "json:TAG"}


# --- Episodes --------------------------------------------------------------------------------------------

CALLS = {
    "hermes": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=calculator>\n<parameter=expression>\n6 * 7\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama": '{"name": "calculator", "parameters": {"expression": "6 * 7"}}',
    "mistral": '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "6 * 7"}}]',
}


def played(template: str, script: list[str], **settings: Any) -> RolloutBatch:
    """A group of one episode, as a worker plays it, whose model says these texts."""
    tokenizer = tokenizer_with(template)
    agent = Agent(engine=ScriptedEngine(script, tokenizer=tokenizer), tokenizer=tokenizer, model="m")
    run = RunConfig(model="m", env=("moar_cats",), group_size=1, tools=("calculator",), **settings)
    sampler = GroupSampler(run=run, run_episode=episodes_of_run(run, agent), environments=make_environments(run))
    return sampler.sample([0], "w0-test")


@pytest.mark.parametrize("template", [template for template, name in FORMATS.items() if name])
def test_a_run_that_names_no_format_runs_the_calls_of_its_model(template: str, caplog: Any) -> None:
    caplog.set_level("INFO")
    name = FORMATS[template]
    assert name is not None
    (row,) = played(template, [CALLS[name], "cats"]).groups[0].rollouts
    assert [call.result for step in row.agent_steps for call in step.tool_calls] == ["42"]
    assert f"tool calls are read as {name}: the chat template writes them so" in caplog.text


def test_a_format_that_is_named_goes_before_the_template_and_one_that_cant_be_told_is_said(caplog: Any) -> None:
    caplog.set_level("INFO")
    (row,) = played(QWEN3_CODER, [CALLS["hermes"], "cats"], tool_format="hermes").groups[0].rollouts
    assert len([call for step in row.agent_steps for call in step.tool_calls]) == 1
    assert "tool calls" not in caplog.text
    played(GLM, ["cats"])
    assert "read as hermes: the chat template shows no tool call in a format that ludic knows" in caplog.text


def test_an_exported_conversation_is_rendered_to_the_text_that_was_sampled(tmp_path: Path) -> None:
    batch = played(QWEN3_CODER, ["I look.\n" + CALLS["qwen3_coder"], "42 cats"])
    root = put_run(str(tmp_path / "run"), RunConfig(model="m", env=("moar_cats",), group_size=1))
    with RolloutWriter(root, "w0-test") as writer:
        writer.append(batch)
    ludic.open(root.url).export("jsonl", tmp_path / "rows.jsonl")
    messages = json.loads((tmp_path / "rows.jsonl").read_text())["messages"]
    tokenizer, schemas = tokenizer_with(QWEN3_CODER), [calculator_schema()]
    (row,) = batch.groups[0].rollouts
    sampled = tokenizer.decode([*row.prompt_tokens, *row.response_tokens])
    assert tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False) == sampled + "\n"
    # The call apart from the text, as other programs store it.
    call = row.agent_steps[0].tool_calls[0]
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    asked = next(each for each in messages if each["role"] == "assistant")
    asked |= {"content": "I look.", "tool_calls": [{"type": "function", "function": function}]}
    assert tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False) == sampled + "\n"


def calculator_schema() -> dict[str, Any]:
    (tool,) = make_tools(["calculator"])
    return dict(tool.schema)
