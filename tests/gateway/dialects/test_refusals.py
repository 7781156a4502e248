import json
import time

import pytest
from gateway.dialects.clients import body, user_turn

from ludic.gateway.calls import STATUS, RefusedCallError, refused
from ludic.gateway.dialects import DIALECTS

HI = [user_turn("hi")]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
FLAT = {"type": "function", **FUNCTION}
CLAUDE = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "the body is empty"),
        (b"{", "the body is not JSON: Expecting property name"),
        (b"\xff{}", "the body is not UTF-8: byte 0 is 0xff"),
        (b"[]", r"the body is \[\], wanted a JSON object"),
        (b'{"model": "m", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"model": "m", "temperature": 1e999}', "1e999 is larger than the largest float"),
        (b'{"model": "m", "model": "n"}', "an object has the key 'model' twice"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"messages": ' + b"[" * 101 + b"]" * 101 + b"}", "messages is nested too deeply, wanted at most 100 levels"),
        (b'{"tools": [{"\\ud83d": 1}]}', "tools has half of a surrogate pair"),
        (b'{"\\ud83d": 1}', "a field's name has half of a surrogate pair"),
        (b"{}", "model is missing, wanted one of m"),
        (b'{"model": "x"}', "model is 'x', wanted one of m"),
        (b'{"model": ["m"]}', r"model is \['m'\], wanted a text"),
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_bad_body_is_refused_with_a_sentence(dialect, raw, sentence):
    with pytest.raises(RefusedCallError, match=sentence):
        DIALECTS[dialect].read(raw, names=["m"])


REFUSED = [
    ("chat", {"n": 2}, "n is 2, wanted 1"),
    ("chat", {"n": True}, "n is True, wanted 1"),
    ("chat", {"logit_bias": {"5": 1}}, "logit_bias is .*, wanted {}"),
    ("chat", {"frequency_penalty": 0.5}, "frequency_penalty is 0.5, wanted 0"),
    ("chat", {"top_logprobs": 5}, "top_logprobs is 5, wanted 0"),
    ("chat", {"functions": [FUNCTION]}, r"functions is .*, wanted \[\]; send tools"),
    ("chat", {"modalities": ["text", "audio"]}, r'wanted \["text"\]; ludic trains on text'),
    ("chat", {"temperature": "hot"}, "temperature is 'hot', wanted a number"),
    ("chat", {"temperature": 10**400}, "temperature is 1000.*, wanted a number"),
    ("chat", {"max_tokens": 2**63}, "max_tokens is 9223372036854775808, wanted a positive whole number"),
    ("chat", {"stop": ["a", ""]}, "stop is .*, wanted a text, or a list of texts, none of them empty"),
    ("chat", {"max_tokens": 0}, "max_tokens is 0, wanted a positive whole number"),
    ("chat", {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens is 6, wanted 5 as in max_tokens"),
    ("chat", {"guided_json": {}}, "guided_json is not a field of chat completions that ludic reads; remove it"),
    ("chat", {"stream_options": {"chunks": 1}}, "stream_options.chunks is not a field"),
    ("chat", {"tools": [FLAT, FLAT]}, r"tools\[\].name is not a field"),
    ("chat", {"tools": [{"type": "function", "function": FUNCTION}] * 2}, r"tools\[1\] is 'f', wanted a name that no"),
    ("chat", {"tools": [{"type": "function", "function": {"name": ""}}]}, r"tools\[0\].function.name is '', wanted"),
    ("completions", {"prompt": ["a", "b"]}, "prompt is .*, wanted one prompt"),
    ("completions", {"prompt": [-1]}, "prompt is -1, wanted token ids from 0"),
    ("completions", {"prompt": [2**31]}, "prompt is 2147483648, wanted token ids"),
    ("completions", {"prompt": "a", "echo": True}, "echo is True, wanted false"),
    ("completions", {"prompt": "a", "best_of": 2}, "best_of is 2, wanted 1"),
    ("completions", {}, "prompt is missing"),
    ("responses", {"background": True}, "background is True, wanted false"),
    ("responses", {"previous_response_id": "chatcmpl-1"}, "previous_response_id is .*, wanted the id of an earlier"),
    ("responses", {"include": ["everything"]}, "include is 'everything', wanted reasoning.encrypted_content"),
    ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers is .*; ludic runs no tools of a server"),
    ("messages", {"tools": [{"name": "f"}]}, r"tools\[0\].input_schema is None, wanted a JSON schema"),
    ("messages", {"tools": [{**CLAUDE, "defer_loading": True}]}, r"tools\[\].defer_loading is not a field"),
]


@pytest.mark.parametrize(("dialect", "fields", "sentence"), REFUSED)
def test_a_field_that_can_not_be_used_is_refused_by_name(dialect, fields, sentence):
    base = {"model": "m"} if dialect == "completions" else json.loads(body(dialect, HI))
    for lenient in (False, True):
        with pytest.raises(RefusedCallError, match=sentence) as caught:
            DIALECTS[dialect].read(json.dumps({**base, **fields}).encode(), lenient=lenient)
        assert STATUS[caught.value.reason] == 400


LENIENT = [
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ("chat", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ("responses", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ("responses", {"tools": [FLAT, {"type": "web_search"}]}, "tools[1].type"),
    ("responses", {"truncation": "auto"}, "truncation"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ("chat", {"model": "other"}, "model"),
]


@pytest.mark.parametrize(("dialect", "fields", "name"), LENIENT)
def test_lenient_treats_what_can_not_be_recorded_exactly_as_auto(dialect, fields, name):
    raw = json.dumps({**json.loads(body(dialect, HI)), **fields}).encode()
    with pytest.raises(RefusedCallError) as caught:
        DIALECTS[dialect].read(raw, names=["m"])
    assert caught.value.field == name
    request = DIALECTS[dialect].read(raw, lenient=True, names=["m"])
    assert request.treated == (name,)
    assert name == "model" or name in request.asked
    assert [tool["function"]["name"] for tool in request.tools] == ["f"] * (name == "tools[1].type")


NAMES = ",".join(f'"{number}": 0' for number in range(60_000))


@pytest.mark.parametrize(
    ("dialect", "raw", "sentence"),
    [
        ("chat", f'{{{NAMES}, "59999": 1}}', "an object has the key '59999' twice"),
        ("chat", {"messages": HI, "tools": [{}] * 2_001}, "tools has 2,001 tools, wanted at most 2,000"),
        ("messages", {"messages": HI, "stop_sequences": ["a"] * 257}, "stop_sequences is .* at most 256"),
        ("responses", {"input": [{}] * 40_001}, "input has 40,001 items, wanted at most 40,000"),
        ("messages", {"messages": [{"content": [{}] * 100_000}]}, "the body has 100,003 objects and lists, wanted at"),
    ],
)
def test_a_body_of_many_small_parts_is_refused_before_they_take_seconds(dialect, raw, sentence):
    raw = raw if isinstance(raw, str) else json.dumps({"model": "m", **raw})
    began = time.process_time()
    with pytest.raises(RefusedCallError, match=sentence):
        DIALECTS[dialect].read(raw.encode(), names=["m"])
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("dialect", "turns", "sentence"),
    [
        ("chat", [], "messages is empty"),
        ("chat", "hi", "messages is no list, wanted a list of messages"),
        ("chat", HI * 20_001, "messages has 20,001 messages, wanted at most 20,000"),
        ("chat", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'"),
        ("chat", [{"role": "user", "content": "a", "colour": "red"}], r"messages\[\].colour is not a field"),
        ("chat", [{"role": "assistant", "content": "a", "weight": 0}, *HI], r"messages\[0\] is marked for training"),
        (
            "chat",
            [*HI, {"role": "tool", "tool_call_id": "x", "content": "a"}],
            r"messages\[1\] is the result of a tool",
        ),
        ("messages", [*HI, {"role": "assistant", "content": "{"}], "ludic does not continue an answer"),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], "'image'"),
        ("responses", [{"type": "item_reference", "id": "x"}], r"input\[0\].type is 'item_reference', wanted one of"),
        ("responses", [*HI, {"type": "reasoning", "encrypted_content": "gAAA"}], r"input\[1\].encrypted_content"),
        ("responses", [{"type": "function_call", "call_id": "x", "arguments": "{}"}], r"input\[0\].name is None"),
        ("responses", [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}], r"input\[0\].tool_c"),
        ("responses", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "'input_image'"),
    ],
)
def test_a_message_that_can_not_be_used_is_refused_by_its_place(dialect, turns, sentence):
    with pytest.raises(RefusedCallError, match=sentence):
        DIALECTS[dialect].read(body(dialect, turns), lenient=True)


def test_settings_that_are_not_used_and_harmless_fields_are_recorded():
    request = DIALECTS["chat"].read(
        body(
            "chat",
            [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
            temperature=0.3, seed=7, metadata={"a": "b"}, n=1, max_tokens=9, stop="x", parallel_tool_calls=None,
        )
    )  # fmt: skip
    assert request.asked == {
        "temperature": 0.3, "seed": 7, "metadata": {"a": "b"}, "n": 1, "messages[].content[].cache_control": 1,
    }  # fmt: skip
    assert (request.max_tokens, request.stop) == (9, ("x",))


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_tools_are_not_shown_to_a_model_that_must_not_call_them(dialect):
    tool = {"chat": {"type": "function", "function": FUNCTION}, "responses": FLAT, "messages": CLAUDE}[dialect]
    for choice in ("auto", "none"):
        value = {"type": choice} if dialect == "messages" else choice
        request = DIALECTS[dialect].read(body(dialect, HI, tools=[tool], tool_choice=value))
        assert len(request.tools) == (choice == "auto")
        assert request.asked == {"tool_choice": value}


def test_errors_have_the_form_of_their_dialect():
    error = refused("unknown_model", "model is 'x', wanted one of m", field="model")
    for dialect in ("chat", "completions", "responses"):
        found = json.loads(DIALECTS[dialect].error(error))["error"]
        assert found == {
            "message": str(error), "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        }  # fmt: skip
    found = json.loads(DIALECTS["messages"].error(error))
    assert found == {"type": "error", "error": {"type": "not_found_error", "message": str(error)}}
    for dialect in DIALECTS:
        stream = DIALECTS[dialect].stream_error(refused("elsewhere", "it is there", owner="http://there"))
        assert b"it is there" in stream
        assert b'"owner":"http://there"' in stream
        assert stream.endswith(b"\n\n")
