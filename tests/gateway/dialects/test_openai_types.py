"""Parse responses and streams by the types of OpenAI's SDK, where it is installed."""

import json
from collections.abc import Iterator

import pytest
from gateway.dialects.clients import body, events, make_answer, user_turn

from ludic.gateway.calls import RefusedCallError, refused
from ludic.gateway.dialects import DIALECTS, models
from ludic.records import Message, ToolCall

pytestmark = pytest.mark.slow  # importing the SDK takes a second

CALLS = (
    ToolCall(id="c1", name="f", arguments='{"a": 1}'),
    ToolCall(id="c2", name="patch", arguments='{"input": "x"}'),
)
ANSWERS = [
    make_answer(Message(role="assistant", content="Let me look.", reasoning="Hm.", tool_calls=CALLS)),
    make_answer(Message(role="assistant", content="Done\u2028."), finish_reason="length"),
    make_answer(Message(role="assistant", content="")),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_sdk_of_openai_reads_chat_and_completions(answer):
    types = pytest.importorskip("openai.types")
    module = DIALECTS["chat"]
    tools = [{"type": "custom", "custom": {"name": "patch"}}]
    request = module.read(body("chat", [user_turn("hi")], tools=tools, stream_options={"include_usage": True}))
    found = types.chat.ChatCompletion.model_validate_json(module.response(answer, request), strict=True)
    assert [call.type for call in found.choices[0].message.tool_calls or ()] == (["function", "custom"] * 2)[
        : len(answer.message.tool_calls)
    ]
    # The API streams calls of custom tools, too, but the SDK has no type for their deltas.
    for event in (each for each in events(module.stream(answer, request)) if "custom" not in json.dumps(each)):
        types.chat.ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True)

    module = DIALECTS["completions"]
    request = module.read(b'{"model": "m", "prompt": "a"}')
    types.Completion.model_validate_json(module.response(answer, request), strict=True)
    types.Completion.model_validate_json(json.dumps(events(module.stream(answer, request))[-1]), strict=True)
    assert [types.Model.model_validate(each).id for each in json.loads(models(["m"]))["data"]] == ["m"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_sdk_of_openai_reads_responses(answer):
    types = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    module = DIALECTS["responses"]
    tools = [{"type": "custom", "name": "patch"}]
    request = module.read(body("responses", [user_turn("hi")], tools=tools, include=["reasoning.encrypted_content"]))
    found = types.Response.model_validate_json(module.response(answer, request), strict=True)
    assert found.output_text == answer.message.content
    event_type = pydantic.TypeAdapter(types.ResponseStreamEvent)
    names = [event_type.validate_json(json.dumps(each)).type for each in events(module.stream(answer, request))]
    assert names[-1] == f"response.{found.status}"


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses"])
def test_the_sdk_of_openai_raises_for_the_error_of_a_stream(dialect):
    openai = pytest.importorskip("openai")
    httpx = pytest.importorskip("httpx2")
    error = refused("engine", "the engine broke")

    def serve(request: object) -> object:
        events: Iterator[bytes] = iter([DIALECTS[dialect].keep_alive(), DIALECTS[dialect].stream_error(error)])
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b"".join(events))

    client = openai.OpenAI(
        api_key="k", base_url="http://x/v1", http_client=httpx.Client(transport=httpx.MockTransport(serve))
    )
    ask = {
        "chat": lambda: client.chat.completions.create(model="m", messages=[user_turn("hi")], stream=True),
        "completions": lambda: client.completions.create(model="m", prompt="hi", stream=True),
        "responses": lambda: client.responses.create(model="m", input="hi", stream=True),
    }[dialect]
    with pytest.raises(openai.APIError, match="the engine broke"):
        list(ask())
    assert isinstance(error, RefusedCallError)
