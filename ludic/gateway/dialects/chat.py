"""OpenAI's chat completions: read a request, write its response or stream. Pure; raises RefusedCallError."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from ludic.gateway.calls import Answer, CallRequest, RefusedCallError
from ludic.gateway.dialects import rules
from ludic.gateway.dialects.replies import (
    COMMENT,
    DONE,
    custom_input,
    event,
    logprobs_of,
    openai_error,
    openai_error_body,
    openai_usage,
    pieces,
    seconds,
)
from ludic.records import ToolCall

SAMPLING: Mapping[str, rules.Rule] = {
    "model": rules.NAME,
    "temperature": rules.NUMBER,
    "top_p": rules.NUMBER,
    "top_k": rules.INTEGER,
    "min_p": rules.NUMBER,
    "seed": rules.INTEGER,
    "max_tokens": rules.LIMIT,
    "stop": rules.STOPS,
    "n": rules.only(1, why="a call stores one answer"),
    "logit_bias": rules.only({}, why="the logprobs would not be the model's"),
    "frequency_penalty": rules.only(0, why="the engine samples without penalties"),
    "presence_penalty": rules.only(0, why="the engine samples without penalties"),
    "repetition_penalty": rules.only(1, why="the engine samples without penalties"),
    "stream": rules.SWITCH,
    "stream_options": rules.Rule(accepts=lambda value: isinstance(value, dict), wanted="an object", is_recorded=False),
    "user": rules.TEXT,
}
"""Fields that chat completions and completions share."""

_MEDIA = "ludic trains on text"
FIELDS: Mapping[str, rules.Rule] = {
    **SAMPLING,
    "messages": rules.READ,
    "tools": rules.READ,
    "tool_choice": rules.READ,
    "parallel_tool_calls": rules.BOOLEAN,
    "functions": rules.only([], why="send tools"),
    "function_call": rules.only("auto", "none", why="send tools"),
    "max_completion_tokens": rules.LIMIT,
    "response_format": rules.only({"type": "text"}, why="the model's own tokens are recorded", lenient=True),
    "logprobs": rules.SWITCH,
    "top_logprobs": rules.only(0, why="only the logprobs of sampled tokens are kept"),
    "reasoning_effort": rules.TEXT,
    "reasoning": rules.OBJECT,
    "verbosity": rules.TEXT,
    "modalities": rules.only(["text"], why=_MEDIA),
    "audio": rules.only(why=_MEDIA),
    "prediction": rules.only(why="the answer is sampled"),
    "web_search_options": rules.only(why="ludic has no web search", lenient=True),
    "metadata": rules.OBJECT,
    "store": rules.BOOLEAN,
    "service_tier": rules.TEXT,
    "safety_identifier": rules.TEXT,
    "prompt_cache_key": rules.TEXT,
    "prompt_cache_options": rules.OBJECT,
    "prompt_cache_retention": rules.TEXT,
}
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")


def read(body: bytes, *, lenient: bool = False, names: Collection[str] = ()) -> CallRequest:
    """Return the call that a body asks for; as in DialectModule."""
    fields = rules.read_fields(body, FIELDS, "chat completions", lenient=lenient, names=names)
    messages = rules.conversation(fields, fields.get("messages"))
    tools, kinds = _read_tools(fields)
    choice = fields.get("tool_choice")
    if not rules.only_auto(fields, choice, choice):
        tools, kinds = [], {}
    return CallRequest(
        dialect="chat",
        model=fields.get("model"),
        messages=messages,
        tools=tuple(tools),
        tool_kinds=kinds,
        max_tokens=_max_tokens(fields),
        stop=rules.stop_texts(fields.get("stop")),
        stream=fields.get("stream", False),
        include_usage=includes_usage(fields),
        asks_logprobs=fields.get("logprobs", False),
        asked=fields.asked,
        treated=tuple(fields.treated),
    )


def _max_tokens(fields: rules.Fields) -> int | None:
    """Return the smaller limit of the two names that it has."""
    found = [fields.get(name) for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None]
    if len(set(found)) > 1:
        raise rules.wrong("max_completion_tokens", found[1], f"{found[0]} as in max_tokens, or one of the two")
    return found[0] if found else None


def includes_usage(fields: rules.Fields) -> bool:
    """Return whether a stream ends with the usage, and record the other options."""
    options = rules.known_fields(fields, fields.get("stream_options", {}), _STREAM_OPTIONS, "stream_options")
    for name, value in options.items():
        if not isinstance(value, bool):
            raise rules.wrong(f"stream_options.{name}", value, "true or false")
    if "include_obfuscation" in options:
        fields.asked["stream_options.include_obfuscation"] = options["include_obfuscation"]
    return bool(options.get("include_usage", False))


def _read_tools(fields: rules.Fields) -> tuple[list[dict[str, Any]], dict[str, Mapping[str, Any]]]:
    tools: list[dict[str, Any]] = []
    kinds: dict[str, Mapping[str, Any]] = {}
    for at, tool in rules.tool_list(fields):
        match tool.get("type"):
            case "function":
                rules.known_fields(fields, tool, ("type", "function"), at)
                function = rules.function_tool(fields, tool.get("function"), f"{at}.function", ("parameters", "strict"))
                tools.append(function)
            case "custom":
                rules.known_fields(fields, tool, ("type", "custom"), at)
                tools.append(rules.custom_tool(fields, tool.get("custom"), f"{at}.custom"))
                kinds[tools[-1]["function"]["name"]] = {"type": "custom"}
            case kind:
                fields.treat(f"{at}.type", kind, "the type function or custom; ludic runs no tools of a server")
    rules.refuse_same_names(tools)
    return tools, kinds


# --- The response ----------------------------------------------------------------------------------------------------


def _call(call: ToolCall, request: CallRequest, text: str | None = None) -> dict[str, Any]:
    """Return a tool call. text: its arguments or input; None is all."""
    if request.tool_kinds.get(call.name, {}).get("type") == "custom":
        whole = {"name": call.name, "input": custom_input(call) if text is None else text}
        return {"id": call.id, "type": "custom", "custom": whole}
    function = {"name": call.name, "arguments": call.arguments if text is None else text}
    return {"id": call.id, "type": "function", "function": function}


def _envelope(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.call_id}",
        "object": kind,
        "created": seconds(answer),
        "model": answer.model,
    }


def _logprobs(answer: Answer, request: CallRequest) -> dict[str, Any] | None:
    tokens = logprobs_of(answer) if request.asks_logprobs else None
    return None if tokens is None else {"content": tokens, "refusal": None}


def response(answer: Answer, request: CallRequest) -> bytes:
    """Return the body of a response."""
    said = answer.message
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.tool_calls:
        message["content"] = said.content or None
        message["tool_calls"] = [_call(call, request) for call in said.tool_calls]
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    choice = {"index": 0, "message": message, "logprobs": _logprobs(answer, request)}
    choice["finish_reason"] = answer.finish_reason
    whole = _envelope(answer, "chat.completion") | {"choices": [choice], "usage": openai_usage(answer)}
    return msgspec.json.encode(whole)


def stream(answer: Answer, request: CallRequest) -> Iterator[bytes]:
    """Yield the events of a response."""
    envelope = _envelope(answer, "chat.completion.chunk")
    # OpenAI sends null until the last chunk, and leaves the field out without include_usage.
    usage = {"usage": None} if request.include_usage else {}

    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(envelope | {"choices": [choice]} | usage)

    yield chunk({"role": "assistant", "content": ""})
    for delta in _deltas(answer, request):
        yield chunk(delta)
    yield chunk({}, answer.finish_reason, _logprobs(answer, request))
    if request.include_usage:
        yield event(envelope | {"choices": [], "usage": openai_usage(answer)})
    yield DONE


def _deltas(answer: Answer, request: CallRequest) -> Iterator[dict[str, Any]]:
    said = answer.message
    for text in pieces(said.reasoning or ""):
        yield {"reasoning_content": text}
    for text in pieces(said.content):
        yield {"content": text}
    for number, call in enumerate(said.tool_calls):
        first = _call(call, request, "")
        yield {"tool_calls": [{"index": number, **first}]}
        kind = first["type"]
        name, whole = ("input", custom_input(call)) if kind == "custom" else ("arguments", call.arguments)
        for text in pieces(whole):
            yield {"tool_calls": [{"index": number, kind: {name: text}}]}


def keep_alive() -> bytes:
    """Return what a stream sends before its first event."""
    return COMMENT


def error(error: RefusedCallError) -> bytes:
    """Return the body of an error."""
    return openai_error_body(error)


def stream_error(error: RefusedCallError) -> bytes:
    """Return the events that end a stream in which only keep-alives were sent."""
    return event({"error": openai_error(error)}) + DONE
