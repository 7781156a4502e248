"""A message is read as what it means, or refused by the name of the field."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.agents.environment_calls import checked_messages
from ludic.errors import RefusedRecordError
from ludic.records.messages import marked, read_messages, read_tools, to_message
from ludic.records.rollout import ROLES, Message, ToolCall

ASKED = {"role": "user", "content": "Weather in 北京?"}


def call(id_: str = "c1", name: str = "look", arguments: Any = '{"city": "北京"}') -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


LOOK = ToolCall(id="c1", name="look", arguments='{"city": "北京"}')


def said(content: str = "", **fields: Any) -> Message:
    return Message(role="assistant", content=content, **fields)


READ: dict[str, tuple[dict[str, Any], list[Message]]] = {
    "text": ({"content": "sun"}, [said("sun")]),
    "empty text": ({"content": ""}, [said("")]),
    "NUL": ({"content": "a\0b"}, [said("a\0b")]),
    "text parts": (
        {
            "content": [
                {"type": "text", "text": "sun"},
                {"type": "output_text", "text": "warm"},
                {"type": None, "text": "dry"},
            ]
        },
        [said("sun\nwarm\ndry")],
    ),
    "reasoning_content": ({"content": "sun", "reasoning_content": "hm"}, [said("sun", reasoning="hm")]),
    "reasoning": ({"content": "sun", "reasoning": "hm"}, [said("sun", reasoning="hm")]),
    "thinking": ({"content": "sun", "thinking": "hm", "reasoning": "hm"}, [said("sun", reasoning="hm")]),
    "reasoning alone": ({"content": None, "reasoning_content": "hm"}, [said("", reasoning="hm")]),
    "empty reasoning": ({"content": "sun", "reasoning_content": ""}, [said("sun", reasoning="")]),
    "thinking parts": (
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "sun"}]},
        [said("sun", reasoning="hm")],
    ),
    "reasoning parts of inspect": (
        {"content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "sun"}]},
        [said("sun", reasoning="hm")],
    ),
    "refusal": ({"content": None, "refusal": "no"}, [said("no")]),
    "refusal part": ({"content": [{"type": "refusal", "refusal": "no"}]}, [said("no")]),
    "tool call": ({"content": None, "tool_calls": [call()]}, [said(tool_calls=(LOOK,))]),
    "tool call without content": ({"tool_calls": [call()]}, [said(tool_calls=(LOOK,))]),
    "a call of a custom tool": (
        {"tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "look", "input": "北京"}}]},
        [said(tool_calls=(ToolCall(id="c1", name="look", arguments='{"input": "北京"}'),))],
    ),
    "tool calls as JSON text": ({"content": "", "tool_calls": json.dumps([call()])}, [said(tool_calls=(LOOK,))]),
    "arguments as an object": (
        {"content": None, "tool_calls": [call(arguments={"city": "北京"})]},
        [said(tool_calls=(LOOK,))],
    ),
    "an argument that is null": (
        {"content": None, "tool_calls": [call(arguments={"city": None})]},
        [said(tool_calls=(ToolCall(id="c1", name="look", arguments='{"city": null}'),))],
    ),
    **{
        f"arguments {arguments!r}": (
            {"content": None, "tool_calls": [call(arguments=arguments)]},
            [said(tool_calls=(ToolCall(id="c1", name="look", arguments="{}"),))],
        )
        for arguments in (None, "", {})
    },
    "no arguments": (
        {"content": None, "tool_calls": [{"function": {"name": "look"}}]},
        [said(tool_calls=(ToolCall(id="", name="look", arguments="{}"),))],
    ),
    "a call of verifiers": (
        {"content": "", "tool_calls": [{"id": "c1", "name": "look", "arguments": LOOK.arguments}]},
        [said(tool_calls=(LOOK,))],
    ),
    "function_call": (
        {"content": None, "function_call": {"name": "look", "arguments": LOOK.arguments}},
        [said(tool_calls=(ToolCall(id="", name="look", arguments=LOOK.arguments),))],
    ),
    "tool_use": (
        {
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"city": "北京"}},
            ]
        },
        [said("I look.", tool_calls=(LOOK,))],
    ),
    "system": ({"role": "system", "content": "brief"}, [Message(role="system", content="brief")]),
    "developer": ({"role": "developer", "content": "brief"}, [Message(role="developer", content="brief")]),
    "user with a name": (
        {"role": "user", "name": "Ada", "content": "q"},
        [Message(role="user", content="q", name="Ada")],
    ),
    "tool": (
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        [Message(role="tool", content="7", tool_call_id="c1")],
    ),
    "function, a result of before tools": (
        {"role": "function", "name": "look", "content": "7"},
        [Message(role="tool", content="7", name="look")],
    ),
    "tool_result alone": (
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "7"}]},
        [Message(role="tool", content="7", tool_call_id="c1")],
    ),
    "tool_result and text": (
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "7"}]},
                {"type": "tool_result", "tool_use_id": "c2"},
                {"type": "text", "text": "go on"},
            ],
        },
        [
            Message(role="tool", content="7", tool_call_id="c1"),
            Message(role="tool", content="", tool_call_id="c2"),
            Message(role="user", content="go on"),
        ],
    ),
}
"""Messages, of the assistant unless they say otherwise, and what they are read as."""


@pytest.mark.parametrize("name", READ)
def test_a_message_is_read_as_what_it_means(name: str) -> None:
    value, wanted = READ[name]
    read = read_messages([{"role": "assistant", **value}])
    assert [*read.messages] == wanted
    assert read.trained == tuple(message.role == "assistant" for message in wanted)
    assert read.unread == {}
    # null is absent, and the order of the fields says nothing
    padded = {**dict.fromkeys(("tool_calls", "name", "weight", "reasoning", "refusal", "x")), "role": "assistant"}
    assert read_messages([dict(reversed({**padded, **value}.items()))]) == read


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"content {content!r}": ({"content": content}, f"messages[0].content is {content!r}, wanted a text")
        for content in (5, 1.5, True, {"text": "sun"}, b"sun")
    },
    "content of texts": ({"content": ["sun"]}, "messages[0].content[0] is 'sun', wanted an object with type"),
    "content null": ({"content": None}, "messages[0] has no content, wanted a text"),
    "content absent": ({}, "messages[0] has no content, wanted a text"),
    "content without parts": ({"content": []}, "messages[0] has no content, wanted a text"),
    "no message": ({"role": "user", "content": None}, "messages[0] has no content"),
    "a result without content": ({"role": "tool", "content": None}, "messages[0] has no content"),
    "an empty refusal": ({"content": None, "refusal": ""}, "messages[0] has no content"),
    **{
        f"part {kind}": (
            {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "x"}}]},
            f"messages[0].content[1].type is {kind!r}, wanted one of text,",
        )
        for kind in ("image_url", "image", "input_image", "input_audio", "audio", "video", "file", "document", "odd")
    },
    "part without type": ({"content": [{"image": "x"}]}, "messages[0].content[0].type is None"),
    "part of null": ({"content": [{"type": "text", "text": None}]}, "messages[0].content[0] has no texts of text"),
    "part of a number": ({"content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text is 5, wanted a text"),
    "redacted thinking": (
        {"content": [{"type": "reasoning", "reasoning": "xx==", "redacted": True}]},
        "messages[0].content[0] is redacted, wanted thinking as text",
    ),
    "redacted_thinking": (
        {"content": [{"type": "redacted_thinking", "data": "xx=="}]},
        "messages[0].content[0].type is 'redacted_thinking'",
    ),
    **{
        f"role {role!r}": ({"role": role, "content": "q"}, f"messages[0].role is {role!r}, wanted one of system, devel")
        for role in ("human", "gpt", "User", "", None, 3, ["user"])
    },
    "reasoning of a user": (
        {"role": "user", "content": "q", "reasoning": "hm"},
        "messages[0] has reasoning and the role user; only the assistant has reasoning",
    ),
    "reasoning as an object": (
        {"content": "a", "reasoning": {"effort": "low"}},
        "messages[0].reasoning is {'effort': 'low'}, wanted a text",
    ),
    "two texts of thinking": (
        {"content": "a", "reasoning": "b", "thinking": "c"},
        "messages[0] has different texts in reasoning and thinking",
    ),
    "calls of a user": (
        {"role": "user", "content": "q", "tool_calls": [call()]},
        "messages[0] has tool_calls and the role user",
    ),
    "content and a refusal": ({"content": "a", "refusal": "no"}, "messages[0] has content and a refusal"),
    "a tool_result of the assistant": (
        {"content": [{"type": "tool_result", "tool_use_id": "c1", "content": "7"}]},
        "messages[0].content has a tool_result and the role assistant",
    ),
    "an image as a result": (
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image"}]}]},
        "messages[0].content[0].content[0].type is 'image'",
    ),
    "name": ({"content": "a", "name": 3}, "messages[0].name is 3, wanted a text"),
    "tool_calls": ({"tool_calls": 3}, "messages[0].tool_calls is 3, wanted a list"),
    "tool_calls as broken JSON": (
        {"tool_calls": "[{"},
        "messages[0].tool_calls is '[{', wanted a list of tool calls; as",
    ),
    "a call": ({"tool_calls": [3]}, "messages[0].tool_calls[0] is 3, wanted an object"),
    "input as a text": (
        {"content": [{"type": "tool_use", "id": "c1", "name": "look", "input": "{}"}]},
        "messages[0].content[0].input is '{}', wanted an object",
    ),
    "a kind of call": (
        {"tool_calls": [{"type": "shell", "shell": {}}]},
        "messages[0].tool_calls[0].type is 'shell', wanted function or custom",
    ),
    "a custom tool without input": (
        {"tool_calls": [{"type": "custom", "custom": {"name": "look"}}]},
        "messages[0].tool_calls[0] has no texts of input, wanted one",
    ),
    "a call without a name": ({"tool_calls": [call(name="")]}, "messages[0].tool_calls[0] has no name"),
    "an id": ({"tool_calls": [{**call(), "id": 7}]}, "messages[0].tool_calls[0].id is 7, wanted a text"),
    "arguments": (
        {"tool_calls": [call(arguments=[1])]},
        "messages[0].tool_calls[0].function.arguments is [1], wanted an object, or its JSON text",
    ),
    "function_call": ({"content": "a", "function_call": "auto"}, "messages[0].function_call is 'auto', wanted an obj"),
    "function_call and tool_calls": (
        {"tool_calls": [call()], "function_call": {"name": "look"}},
        "messages[0] has tool_calls and function_call",
    ),
    "weight 0.5": ({"content": "a", "weight": 0.5}, "messages[0].weight is 0.5, wanted 0 or 1"),
    "train yes": ({"content": "a", "train": "yes"}, "messages[0].train is 'yes', wanted true or false"),
    "loss": ({"content": "a", "loss": 0.5}, "messages[0].loss is 0.5, wanted true or false"),
    "images beside content": ({"content": "a", "images": ["x"]}, "messages[0].images is ['x'], wanted none"),
    "an image in a text": (
        {"content": [{"type": "text", "text": "a", "image": "x"}]},
        "messages[0].content[0].image is 'x', wanted none",
    ),
    "a text behind a call": (
        {"content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}, {"type": "text", "text": "a"}]},
        "messages[0].content[1] is text behind other parts, wanted thinking and results of tools first",
    ),
    **{
        f"arguments {text}": (
            {"tool_calls": [call(arguments=text)]},
            "messages[0].tool_calls[0].function.arguments is ",
        )
        for text in ("{'a': 1}", '{"a": NaN}', '"{}"', "[1]", "{", "1")
    },
    "marks": ({"content": "a", "weight": 0, "train": True}, "messages[0] has weight 0 and train True"),
    "a user to learn": (
        {"role": "user", "content": "q", "weight": 1},
        "messages[0].weight is 1, wanted none for the role user; only turns of the assistant are trained on",
    ),
    "half a pair": (
        {"content": "half \ud83e"},
        "messages[0].content is 'half \\ud83e', wanted text that UTF-8 can hold",
    ),
    "half a pair in reasoning": (
        {"content": "a", "reasoning": "\ud83e"},
        "messages[0].reasoning is '\\ud83e', wanted te",
    ),
    "an infinite argument": (
        {"tool_calls": [call(arguments={"x": float("inf")})]},
        "messages[0].tool_calls[0].function.arguments is {'x': inf}, wanted what JSON can hold",
    ),
    "half a pair in arguments": (
        {"tool_calls": [call(arguments={"x": "\ud83e"})]},
        "messages[0].tool_calls[0].arguments is",
    ),
}
"""Messages, of the assistant unless they say otherwise, and the beginning of the reason why they are refused."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_is_not_used_is_refused_by_the_name_of_its_field(name: str) -> None:
    value, reason = REFUSED[name]
    with pytest.raises(RefusedRecordError) as caught:
        read_messages([{"role": "assistant", **value}])
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize("value", ["text", None, 3, {"role": "user", "content": "q"}])
def test_what_is_no_list_of_messages_is_refused(value: Any) -> None:
    with pytest.raises(RefusedRecordError, match=r"^prompt is .*, wanted a list of messages$"):
        read_messages(value, "prompt")


# --- Turns without loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "wanted"),
    [
        ([{}, {}], [True, True]),
        ([{"weight": 0}, {}], [False, True]),
        ([{"weight": 0}, {"weight": 1}], [False, True]),
        ([{"weight": 1}, {}], [True, True]),  # OpenAI trains on turns without a weight
        ([{"train": False}, {}], [False, True]),
        ([{"trainable": False}, {}], [False, True]),
        ([{"trainable": True}, {}], [True, False]),  # ART marks those that were sampled
        ([{"trainable": True, "weight": 1}, {"weight": 0.0}], [True, False]),
        ([{"weight": 0}, {"train": 0}], [False, False]),
    ],
)
def test_a_mark_says_which_turns_are_trained(marks: list[dict[str, Any]], wanted: list[bool]) -> None:
    turns = [{"role": "assistant", "content": "a", **mark} for mark in marks]
    asked = {**ASKED, "weight": 0, "train": False}
    read = read_messages([asked, turns[0], asked, turns[1]])
    assert read.trained == (False, wanted[0], False, wanted[1])
    assert read.unread == {}


def test_turns_of_an_answer_keep_their_own_marks_and_a_prompt_has_none() -> None:
    conversation = [ASKED, {"role": "assistant", "content": "a", "weight": 0}, {"role": "assistant", "content": "b"}]
    answer = marked(conversation, trained=True)
    assert [each["trainable"] for each in answer] == [False, False, True]
    assert "weight" not in answer[1]
    assert read_messages(answer).trained == (False, False, True)
    assert read_messages(marked(conversation, trained=False)).trained == (False, False, False)


# --- Results of tools ------------------------------------------------------------------------------------------------


def result(id_: str | None, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id_}


def asked_for(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(id_) for id_ in ids]}


def test_results_of_tools_are_in_the_order_of_their_calls() -> None:
    first = [asked_for("a", "b", "c"), result("c", "3"), result("a", "1"), result("b", "2"), ASKED]
    read = read_messages([*first, asked_for("d", "e"), result("e", "5"), result("d", "4")])
    assert [each.content for each in read.messages if each.role == "tool"] == ["1", "2", "3", "4", "5"]
    assert [*read.sources] == [0, 2, 3, 1, 4, 5, 7, 6]
    # as they are, where no id says otherwise
    assert [
        each.content for each in read_messages([asked_for("a", "b"), result(None, "2"), result(None, "1")]).messages
    ][1:] == ["2", "1"]
    assert to_message(result("x", "of a call in the text")).tool_call_id == "x"


def test_a_result_without_an_id_is_that_of_the_next_call_that_has_none() -> None:
    read = read_messages([asked_for("a", "b", "c"), result("b", "2"), result(None, "1"), result(None, "3")])
    assert [each.content for each in read.messages[1:]] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASKED, result("a", "1")], r"messages\[1\] is the result of a tool behind user"),
        (
            [asked_for("a", "b"), result("a", "1"), result("a", "2")],
            r"messages\[2\].tool_call_id is 'a', wanted the id of a call of messages\[0\] that has no result before it",
        ),
        ([asked_for("a"), result("a", "1"), result(None, "2")], r"messages\[2\] is one more result than messages"),
    ],
)
def test_a_result_that_belongs_to_no_call_is_refused(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(RefusedRecordError, match=reason):
        read_messages(messages)


def test_a_result_of_no_call_is_refused() -> None:
    with pytest.raises(RefusedRecordError, match=r"messages\[2\].tool_call_id is 'x', wanted the id of a call of mess"):
        read_messages([ASKED, asked_for("a", "b"), result("x", "1")])


def test_messages_of_known_tokens_are_as_they_were() -> None:
    values = [asked_for("a", "b"), result("b", "2"), result("x", "1"), {"role": "assistant", "content": None}]
    read = read_messages(values, has_tokens=True)
    assert [each.content for each in read.messages] == ["", "2", "1", ""]


# --- Fields that are not known ---------------------------------------------------------------------------------------


def test_unknown_fields_are_counted_by_messages() -> None:
    part = {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [part, part], "mood": "calm", "annotations": [], "x": None},
        {"role": "assistant", "mood": "gay", "tool_calls": [{**call(), "index": 0}], "tool_call_id": "c1"},
    ]
    assert read_messages(messages).unread == {
        "messages[].mood": 2,
        "messages[].content[].cache_control": 1,
        "messages[].tool_calls[].index": 1,
        "messages[].tool_call_id": 1,
    }


# --- Schemas of tools ------------------------------------------------------------------------------------------------

SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


_OF_LOOK = {"type": "object"}


@pytest.mark.parametrize(
    "value",
    [
        [SCHEMA],
        json.dumps([SCHEMA]),
        [{"name": "look", "input_schema": _OF_LOOK}],
        [{"type": "custom", "name": "look", "input_schema": _OF_LOOK, "parameters": None}],
        [{"name": "look", "parameters": _OF_LOOK}],
        [{"type": "function", "name": "look", "parameters": _OF_LOOK}],
    ],
)
def test_schemas_of_tools_are_a_list_or_its_json(value: Any) -> None:
    assert read_tools(value) == [SCHEMA]
    assert read_tools(None) == []


def test_a_schema_of_a_tool_has_its_parameters_once() -> None:
    with pytest.raises(RefusedRecordError, match=r"tools has 'look' with input_schema and parameters, wanted one"):
        read_tools([{"name": "look", "input_schema": _OF_LOOK, "parameters": _OF_LOOK}])


@pytest.mark.parametrize("value", ["none", "[1]", {"name": "look"}, [1], 3, '{"name": "look"}'])
def test_other_schemas_are_refused(value: Any) -> None:
    with pytest.raises(RefusedRecordError, match=r"^tools is .*, wanted a list of the tools' JSON schemas"):
        read_tools(value)


# --- Messages of an environment --------------------------------------------------------------------------------------


def test_an_environment_may_use_the_known_roles_alone() -> None:
    messages = tuple(Message(role=role, content="q") for role in ROLES)
    assert checked_messages("reset", messages) == messages
    with pytest.raises(
        ValueError, match=r"a message of reset has the role 'human', wanted one of system, developer, us"
    ):
        checked_messages("reset", [Message(role="human", content="q")])
    with pytest.raises(
        RefusedRecordError, match=r"messages\[0\].role is 'human', wanted one of system, developer, user"
    ):
        read_messages([Message(role="human", content="q")])
    with pytest.raises(RefusedRecordError, match=r"messages\[0\].content is None, wanted a text"):
        read_messages([Message(role="user", content=None)])  # type: ignore[arg-type]


# --- Texts are stored as they are ------------------------------------------------------------------------------------

_OF_USERS = ("adapters/imports", "agents", "environments", "records/messages.py", "base/row_files.py", "show")
"""Code that stores or shows texts of users as JSON."""
_HASHED = {"sha256", "blake2b", "digest"}


def _json_without_choice() -> list[str]:
    """Calls of json.dumps that escape 北京, without saying that they want to, unless the text is only hashed."""
    found = []
    package = Path(ludic.__file__).parent
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith(_OF_USERS):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        hashed = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _HASHED
            for inner in ast.walk(node)
        }
        found += [
            f"{name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) == "json.dumps"
            and id(node) not in hashed
            and not {"ensure_ascii", "sort_keys"} & {keyword.arg for keyword in node.keywords}
        ]
    return found


def test_texts_of_users_become_json_as_they_are() -> None:
    assert _json_without_choice() == []
