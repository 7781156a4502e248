"""Write conversations into bodies, read responses and streams, and send answers back, as clients of each dialect do."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ludic.gateway.calls import Answer, Dialect
from ludic.records import Message

PATHS = ("chat", "responses", "messages")
"""Dialects of conversations."""
_INPUT = {"chat": "messages", "responses": "input", "messages": "messages"}
Value = dict[str, Any]


def body(dialect: Dialect, turns: list[Value], **fields: Any) -> bytes:
    """Return the body of a request."""
    return json.dumps({"model": "m", _INPUT[dialect]: turns, **fields}, ensure_ascii=False).encode()


def user_turn(text: str) -> Value:
    return {"role": "user", "content": text}


def result_turns(dialect: Dialect, answer: Message, texts: list[str]) -> list[Value]:
    """Return the turns with the results of an answer's tool calls."""
    found = [*zip((call.id for call in answer.tool_calls), texts, strict=True)]
    if dialect == "chat":
        return [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in found]
    if dialect == "responses":
        return [{"type": "function_call_output", "call_id": id_, "output": text} for id_, text in found]
    parts = [{"type": "tool_result", "tool_use_id": id_, "content": text} for id_, text in found]
    return [{"role": "user", "content": parts}]


def sent_back(dialect: Dialect, response: Value) -> list[Value]:
    """Return the turns by which a client continues after a response."""
    match dialect:
        case "chat":
            return [response["choices"][0]["message"]]
        case "responses":
            return list(response["output"])
        case _:
            return [{"role": "assistant", "content": response["content"]}]


def make_answer(message: Message, **fields: Any) -> Answer:
    """Return the answer to a call."""
    values: Value = {
        "call_id": "01a2-b3",
        "created_at": datetime(2026, 11, 30, tzinfo=UTC),
        "model": "m",
        "message": message,
        "finish_reason": "tool_calls" if message.tool_calls else "stop",
        "stop_sequence": None,
        "text": message.content,
        "prompt_length": 50,
        "completion_length": 7,
        "cached_length": 20,
    }
    return Answer(**values | fields)


# --- Streams ---------------------------------------------------------------------------------------------------------


def events(stream: Iterator[bytes]) -> list[Value]:
    """Return the events of a stream, read by lines as Python's splitlines finds them, which is the strictest way."""
    found: list[Value] = []
    for block in b"".join(stream).decode().split("\n\n"):
        for line in block.splitlines():
            kind, _, rest = line.partition(": ")
            assert kind in ("event", "data", ""), line
            if kind == "data" and rest != "[DONE]":
                found.append(json.loads(rest))
            elif kind == "event":
                name = rest
        if found and "type" in found[-1] and block:
            assert found[-1]["type"] == name
    return found


def assembled(dialect: Dialect, stream: list[Value]) -> Value:
    """Return the response that the deltas of a stream make, without those events that repeat whole texts."""
    return {"chat": _chat, "responses": _responses, "messages": _messages}[dialect](stream)


def _add(value: Value, delta: Mapping[str, Any]) -> None:
    """Add a delta to a value, as the SDK of OpenAI does: texts are joined, lists merged by index."""
    for name, new in delta.items():
        old = value.get(name)
        if isinstance(new, dict):
            _add(value.setdefault(name, {}), new)
        elif isinstance(new, list) and new and "index" in new[0]:
            for each in new:
                parts = value.setdefault(name, [])
                parts += [{} for _ in range(each["index"] + 1 - len(parts))]
                _add(parts[each["index"]], {key: part for key, part in each.items() if key != "index"})
        elif isinstance(old, str) and isinstance(new, str):
            value[name] = old + new
        else:
            value[name] = new


def _chat(stream: list[Value]) -> Value:
    message: Value = {"refusal": None}
    choice: Value = {"index": 0, "message": message}
    for chunk in stream:
        for part in chunk["choices"]:
            _add(message, part["delta"])
            choice |= {"finish_reason": part["finish_reason"], "logprobs": part["logprobs"]}
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    top = {name: stream[-1][name] for name in ("id", "created", "model", "usage") if name in stream[-1]}
    return {**top, "object": "chat.completion", "choices": [choice]}


def _messages(stream: list[Value]) -> Value:
    """As the SDK of Anthropic puts a message together."""
    message = stream[0]["message"]
    texts: dict[int, str] = {}
    for event in stream[1:]:
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for index, text in texts.items():
        message["content"][index]["input"] = json.loads(text)
    assert stream[-1] == {"type": "message_stop"}
    return message


_DELTAS = {
    "response.output_text.delta": ("content", "content_index", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_index", "text"),
    "response.function_call_arguments.delta": (None, None, "arguments"),
    "response.custom_tool_call_input.delta": (None, None, "input"),
}


def _responses(stream: list[Value]) -> Value:
    assert [event["sequence_number"] for event in stream] == [*range(len(stream))]
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    items: list[Value] = []
    for event in stream:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "response.content_part.added":
                items[-1]["content"].append(event["part"])
            case "response.reasoning_summary_part.added":
                items[-1]["summary"].append(event["part"])
            case kind if kind in _DELTAS:
                parts, index, name = _DELTAS[kind]
                (items[-1][parts][event[index]] if parts else items[-1])[name] += event["delta"]
            case "response.output_item.done":
                # What deltas do not have.
                items[-1] |= {name: event["item"][name] for name in ("status",) if name in event["item"]}
    return stream[-1]["response"] | {"output": items}
