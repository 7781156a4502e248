"""Anthropic's messages: read a request, write its response or stream. Pure; raises RefusedCallError."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from ludic.base import read_json
from ludic.gateway.calls import Answer, CallRequest, RefusalReason, RefusedCallError, refused
from ludic.gateway.dialects import rules
from ludic.gateway.dialects.replies import event, pieces
from ludic.records import ToolCall


def _keeps_all(value: Any) -> bool:
    """Return whether context_management changes nothing: it clears thinking, and keeps all of it."""
    edits = value.get("edits", []) if isinstance(value, dict) else None
    if not isinstance(edits, list):
        return False
    keeps = ({**each, "type": str(each.get("type"))[:14]} if isinstance(each, dict) else None for each in edits)
    return all(each == {"type": "clear_thinking", "keep": "all"} for each in keeps)


FIELDS: Mapping[str, rules.Rule] = {
    "model": rules.NAME,
    "messages": rules.READ,
    "system": rules.READ,
    "max_tokens": rules.LIMIT,
    "stop_sequences": rules.STOPS,
    "stream": rules.SWITCH,
    "tools": rules.READ,
    "tool_choice": rules.OBJECT,
    "temperature": rules.NUMBER,
    "top_p": rules.NUMBER,
    "top_k": rules.INTEGER,
    "thinking": rules.OBJECT,
    "metadata": rules.OBJECT,
    "cache_control": rules.OBJECT,
    "service_tier": rules.TEXT,
    "inference_geo": rules.TEXT,
    "output_config": rules.READ,
    "output_format": rules.only(why="the model's own tokens are recorded", lenient=True),
    "context_management": rules.Rule(
        accepts=_keeps_all,
        wanted="edits that keep all; ludic leaves out no messages",
        lenient=True,
        reason="not_recordable",
    ),
    "mcp_servers": rules.only([], why="ludic runs no tools of a server"),
    "container": rules.only(why="ludic runs no tools of a server"),
}
_TOOL = ("input_schema", "input_examples", "strict")
SIGNATURE = "ludic"
"""Signature of thinking, which is sent back with it: some clients change thinking without one to text."""


def read(body: bytes, *, lenient: bool = False, names: Collection[str] = ()) -> CallRequest:
    """Return the call that a body asks for; as in DialectModule. max_tokens may be absent, as in count_tokens."""
    fields = rules.read_fields(body, FIELDS, "Anthropic's messages", lenient=lenient, names=names)
    _read_output_config(fields)
    tools = _read_tools(fields)
    if not _may_call(fields):
        tools = []
    return CallRequest(
        dialect="messages",
        model=fields.get("model"),
        messages=_read_messages(fields),
        tools=tuple(tools),
        max_tokens=fields.get("max_tokens"),
        stop=rules.stop_texts(fields.get("stop_sequences")),
        stream=fields.get("stream", False),
        asked=fields.asked,
        treated=tuple(fields.treated),
    )


def _read_messages(fields: rules.Fields) -> Any:
    values = fields.get("messages")
    if not isinstance(values, list) or not values:
        return rules.conversation(fields, values)
    named = [f"messages[{number}]" for number in range(len(values))]
    if fields.get("system") not in (None, "", []):
        values, named = [{"role": "system", "content": fields.get("system")}, *values], ["system", *named]
    messages = rules.conversation(fields, values, names=named)
    if messages[-1].role == "assistant":
        sentence = f"{named[-1]} is of the assistant, wanted the user's: ludic does not continue an answer"
        raise refused("not_recordable", sentence, field="messages")
    return messages


def _read_output_config(fields: rules.Fields) -> None:
    """Record the effort; a format is not enforced."""
    config = fields.get("output_config", {})
    if not isinstance(config, dict):
        raise rules.wrong("output_config", config, "an object")
    found = rules.known_fields(fields, config, ("effort", "format", "task_budget"), "output_config")
    if "format" in found:
        fields.treat("output_config.format", found.pop("format"), "none; the model's own tokens are recorded")
    if found:
        fields.asked["output_config"] = found


def _read_tools(fields: rules.Fields) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for at, tool in rules.tool_list(fields):
        if tool.get("type") not in (None, "custom"):
            wanted = "a tool with input_schema, of type custom; ludic runs no tools of a server"
            fields.treat(f"{at}.type", tool["type"], wanted)
            continue
        if not isinstance(tool.get("input_schema"), dict):
            raise rules.wrong(f"{at}.input_schema", tool.get("input_schema"), "a JSON schema, which is an object")
        tools.append(rules.function_tool(fields, tool, at, _TOOL))
    rules.refuse_same_names(tools)
    return tools


def _may_call(fields: rules.Fields) -> bool:
    choice = fields.get("tool_choice")
    if choice is None:
        return True
    known = ("type", "name", "disable_parallel_tool_use")
    if not isinstance(choice.get("type"), str):
        raise rules.wrong("tool_choice.type", choice.get("type"), "auto or none")
    rules.known_fields(fields, choice, known, "tool_choice")
    return rules.only_auto(fields, choice, choice["type"])


# --- The response ----------------------------------------------------------------------------------------------------


def _input(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = read_json(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        # Only another server's model can have written it; parsers of ludic leave such a call in the text.
        raise refused("upstream", f"the arguments of the call of {call.name!r} are not a JSON object")
    return arguments


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    said = answer.message
    blocks: list[dict[str, Any]] = []
    if said.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": SIGNATURE})
    # Clients send an answer back, and the API takes no message without content.
    if said.content or not (blocks or said.tool_calls):
        blocks.append({"type": "text", "text": said.content})
    for call in said.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)})
    return blocks


def _stop_reason(answer: Answer) -> str:
    if answer.stop_sequence is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_length - answer.cached_length,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_length,
        "output_tokens": answer.completion_length,
    }


def _message(answer: Answer, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.call_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stop_sequence,
        "usage": _usage(answer),
    }


def response(answer: Answer, request: CallRequest) -> bytes:
    """Return the body of a response."""
    return msgspec.json.encode(_message(answer, _blocks(answer)))


def stream(answer: Answer, request: CallRequest) -> Iterator[bytes]:
    """Yield the events of a response."""
    blocks = _blocks(answer)
    calls = {call.id: call.arguments for call in answer.message.tool_calls}
    started = _message(answer, []) | {"stop_reason": None, "stop_sequence": None}
    started["usage"] = _usage(answer) | {"output_tokens": 0}
    yield _event("message_start", message=started)
    for number, block in enumerate(blocks):
        yield _event("content_block_start", index=number, content_block={**block, **_START[block["type"]]})
        for delta in _deltas(block, calls):
            yield _event("content_block_delta", index=number, delta=delta)
        yield _event("content_block_stop", index=number)
    end = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_sequence}
    yield _event("message_delta", delta=end, usage=_usage(answer))
    yield _event("message_stop")


_START: Mapping[str, Mapping[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""Fields of a block that its deltas fill."""


def _deltas(block: Mapping[str, Any], calls: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a block. calls: arguments by the id of their call, as the model wrote them."""
    match block["type"]:
        case "thinking":
            for text in pieces(block["thinking"]):
                yield {"type": "thinking_delta", "thinking": text}
            yield {"type": "signature_delta", "signature": block["signature"]}
        case "text":
            for text in pieces(block["text"]):
                yield {"type": "text_delta", "text": text}
        case _:
            for text in pieces(calls[block["id"]]):
                yield {"type": "input_json_delta", "partial_json": text}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def keep_alive() -> bytes:
    """Return what a stream sends before its first event."""
    return _event("ping")


_ERRORS: Mapping[RefusalReason, str] = {
    "wrong_key": "authentication_error",
    "unknown_model": "not_found_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "full": "rate_limit_error",
    "stopping": "overloaded_error",
    "upstream": "api_error",
    "engine": "api_error",
}
"""Types of Anthropic's errors; others are invalid_request_error."""


def _error(error: RefusedCallError) -> dict[str, Any]:
    owner = {} if error.owner is None else {"owner": error.owner}
    kind = _ERRORS.get(error.reason, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error), **owner}}


def error(error: RefusedCallError) -> bytes:
    """Return the body of an error."""
    return msgspec.json.encode(_error(error))


def stream_error(error: RefusedCallError) -> bytes:
    """Return the event that ends a stream in which only keep-alives were sent."""
    return event(_error(error), "error")
