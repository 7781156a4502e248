import json

import hypothesis.strategies as st
import numpy as np
import pytest
from gateway.dialects.clients import (
    PATHS,
    assembled,
    body,
    events,
    make_answer,
    result_turns,
    sent_back,
    user_turn,
)
from hypothesis import given, settings

from ludic.gateway.calls import RefusedCallError, StoredCall
from ludic.gateway.dialects import DIALECTS, continued
from ludic.records import Message, ToolCall

# Some are longer than a delta (4,000 characters), and hold what ends a line for some readers, and emojis.
TEXTS = st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=4), st.sampled_from([1, 2_001]))
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=5), st.dictionaries(st.text(max_size=3), VALUES, max_size=2)))


@st.composite
def answers(draw: st.DrawFn, number: int) -> Message:
    """An answer of a conversation; number: of the answer, for ids of its calls that no other answer has."""
    calls = draw(CALLS.filter(lambda found: len(found) < 4))
    return Message(
        role="assistant",
        content=draw(st.one_of(st.just(""), TEXTS)),
        reasoning=draw(st.one_of(st.none(), TEXTS)),
        tool_calls=tuple(
            ToolCall(id=f"call_{number}_{index}", name=name, arguments=json.dumps(arguments, ensure_ascii=False))
            for index, (name, arguments) in enumerate(calls)
        ),
    )


@pytest.mark.parametrize("dialect", PATHS)
@settings(max_examples=25)
@given(st.data())
def test_answers_that_clients_send_back_are_the_messages_that_they_were(dialect, data):
    module, turns, expected = DIALECTS[dialect], [], []
    for number in range(data.draw(st.integers(1, 3), "turns")):
        text = data.draw(TEXTS, "user")
        turns.append(user_turn(text))
        expected.append(Message(role="user", content=text))
        answer = data.draw(answers(number), "answer")
        request = module.read(body(dialect, turns))
        assert list(request.messages) == expected

        response = json.loads(module.response(make_answer(answer), request))
        streamed = assembled(dialect, events(module.stream(make_answer(answer), request)))
        turns += sent_back(dialect, data.draw(st.sampled_from([response, streamed]), "as"))
        results = [data.draw(TEXTS, "result") for _ in answer.tool_calls]
        turns += result_turns(dialect, answer, results) if results else []
        expected.append(answer)
        expected += [
            Message(role="tool", content=text, tool_call_id=call.id)
            for call, text in zip(answer.tool_calls, results, strict=True)
        ]
    turns.append(user_turn("go on"))
    assert list(module.read(body(dialect, turns)).messages)[:-1] == expected


@pytest.mark.parametrize("dialect", PATHS)
@settings(max_examples=25)
@given(answers(0))
def test_a_stream_put_together_is_the_response(dialect, answer):
    module = DIALECTS[dialect]
    options = {"stream_options": {"include_usage": True}} if dialect == "chat" else {}
    request = module.read(body(dialect, [user_turn("hi")], stream=True, **options))
    whole = make_answer(answer)
    assert assembled(dialect, events(module.stream(whole, request))) == json.loads(module.response(whole, request))


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_the_input_of_a_custom_tool_is_free_text(dialect):
    module = DIALECTS[dialect]
    tool = {"name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
    if dialect == "chat":
        grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}}
        tool = {"custom": {"name": "patch", "format": grammar}}
    tools = [{"type": "custom", **tool}]
    request = module.read(body(dialect, [user_turn("hi")], tools=tools))
    function = request.tools[0]["function"]
    assert function["description"] == "The input follows this lark grammar:\nstart: /x/"
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}

    call = ToolCall(id="c", name="patch", arguments='{"input": "*** Begin\\n"}')
    answer = make_answer(Message(role="assistant", content="", tool_calls=(call,)))
    response = json.loads(module.response(answer, request))
    called = sent_back(dialect, response)[0]
    wanted = {"name": "patch", "input": "*** Begin\n"}
    if dialect == "chat":
        assert called["tool_calls"] == [{"id": "c", "type": "custom", "custom": wanted}]
    else:
        assert {name: called[name] for name in ("type", "name", "input")} == wanted | {"type": "custom_tool_call"}
    part = "choices" if dialect == "chat" else "output"
    assert assembled(dialect, events(module.stream(answer, request)))[part] == response[part]
    again = module.read(body(dialect, [user_turn("hi"), *sent_back(dialect, response)]))
    assert again.messages[1].tool_calls == (call,)


def test_completions_stream_their_text():
    module = DIALECTS["completions"]
    request = module.read(b'{"model": "m", "prompt": [1, 2], "stream": true}')
    assert request.prompt.tolist() == [1, 2]
    answer = make_answer(Message(role="assistant", content=""), text="a\u2028😀" * 3_000, finish_reason="length")
    found = events(module.stream(answer, request))
    assert "".join(event["choices"][0]["text"] for event in found) == answer.text
    response = json.loads(module.response(answer, request))
    assert response["choices"][0]["finish_reason"] == found[-1]["choices"][0]["finish_reason"] == "length"
    assert response["id"] == found[0]["id"] == "cmpl-01a2-b3"


def test_a_namespace_is_a_prefix_of_the_names_that_the_model_sees():
    module = DIALECTS["responses"]
    tools = [
        {"type": "function", "name": "f"},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Agents.",
            "tools": [{"type": "function", "name": "spawn", "description": "Start."}, {"type": "custom", "name": "f"}],
        },
        {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read"}]},
    ]
    request = module.read(body("responses", [user_turn("hi")], tools=tools))
    assert [tool["function"]["name"] for tool in request.tools] == [
        "f", "agents__spawn", "agents__f", "mcp__files__read",
    ]  # fmt: skip
    assert request.tools[1]["function"]["description"] == "Agents.\n\nStart."
    calls = (
        ToolCall(id="1", name="agents__spawn", arguments="{}"),
        ToolCall(id="2", name="agents__f", arguments='{"input": "x"}'),
        ToolCall(id="3", name="mcp__files__read", arguments="{}"),
    )
    response = json.loads(
        module.response(make_answer(Message(role="assistant", content="", tool_calls=calls)), request)
    )
    named = [(item["type"], item["namespace"], item["name"]) for item in response["output"]]
    assert named == [
        ("function_call", "agents", "spawn"),
        ("custom_tool_call", "agents", "f"),
        ("function_call", "mcp__files__", "read"),
    ]
    again = module.read(body("responses", [user_turn("hi"), *response["output"]], tools=tools))
    assert again.messages[1].tool_calls == calls


def test_results_behind_an_earlier_response_are_in_the_order_of_their_calls():
    calls = tuple(ToolCall(id=name, name="f", arguments="{}") for name in "ab")
    earlier = StoredCall(
        call_id="1",
        messages=(Message(role="system", content="old"), Message(role="user", content="hi")),
        answer=Message(role="assistant", content="", tool_calls=calls),
        tools_digest=None,
        prompt_tokens=None,
        completion=None,
    )
    results = [{"type": "function_call_output", "call_id": name, "output": name.upper()} for name in "ba"]
    for fields, system in [({}, "old"), ({"instructions": "new"}, "new")]:
        request = DIALECTS["responses"].read(body("responses", results, previous_response_id="resp_1", **fields))
        assert request.previous_id == "1"
        whole = continued(request, earlier)
        assert [message.content for message in whole.messages] == [system, "hi", "", "A", "B"]
    stray = [{"type": "function_call_output", "call_id": "c", "output": "C"}]
    request = DIALECTS["responses"].read(body("responses", stray, previous_response_id="resp_1"))
    with pytest.raises(RefusedCallError, match="tool_call_id is 'c', wanted the id of a call"):
        continued(request, earlier)


@pytest.mark.parametrize(
    ("dialect", "where"), [("chat", "choices"), ("completions", "choices"), ("responses", "output")]
)
def test_logprobs_are_those_of_the_sampled_tokens(dialect, where):
    module = DIALECTS[dialect]
    raw = {
        "chat": body("chat", [user_turn("hi")], logprobs=True),
        "completions": b'{"model": "m", "prompt": "hi", "logprobs": 0}',
        "responses": body("responses", [user_turn("hi")], include=["message.output_text.logprobs"]),
    }[dialect]
    request = module.read(raw)
    answer = make_answer(
        Message(role="assistant", content="é!"),
        token_texts=("é", "!"),
        token_logprobs=np.array([-0.5, -0.25], np.float32),
    )
    found = json.loads(module.response(answer, request))[where][0]
    if dialect == "completions":
        assert found["logprobs"]["token_logprobs"] == [-0.5, -0.25]
        assert found["logprobs"]["text_offset"] == [0, 1]
        return
    tokens = found["logprobs"]["content"] if dialect == "chat" else found["content"][0]["logprobs"]
    assert tokens[0] == {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9], "top_logprobs": []}
    assert [token["logprob"] for token in tokens] == [-0.5, -0.25]


def test_items_of_responses_become_the_messages_that_they_were():
    module = DIALECTS["responses"]
    request = module.read(body("responses", [user_turn("hi")], include=["reasoning.encrypted_content"]))
    said = Message(role="assistant", content="Sun.", reasoning="Hm.")
    reasoning, message = json.loads(module.response(make_answer(said), request))["output"]
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    turns = [
        user_turn("hi"),
        {**reasoning, "summary": []},  # thinking is in encrypted_content, too, which some clients keep alone
        message,
        message,  # one message has one text, and so this is the next one
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
        call,
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "7"}]},
        call | {"call_id": "b"},
        {"type": "reasoning", "summary": []},
        user_turn("go on"),
    ]
    made = tuple(ToolCall(id=name, name="f", arguments="{}") for name in "ab")
    assert module.read(body("responses", turns)).messages[1:] == (
        said,
        Message(role="assistant", content="Sun."),
        Message(role="assistant", content="", reasoning="So.", tool_calls=made[:1]),
        Message(role="tool", content="7", tool_call_id="a"),
        Message(role="assistant", content="", tool_calls=made[1:]),
        Message(role="user", content="go on"),
    )
