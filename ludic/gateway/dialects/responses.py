"""OpenAI's responses: read a request, write its response or stream. Pure; raises RefusedCallError.

A response is a list of items, where chat has messages: the reasoning, text and tool calls of one answer are items of
their own, and become one message again. A namespace is a group of tools; a model sees NAMESPACE__NAME.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any

import msgspec

from ludic.errors import RefusedRecordError
from ludic.gateway.calls import Answer, CallRequest, RefusedCallError, StoredCall, refused
from ludic.gateway.dialects import rules
from ludic.gateway.dialects.replies import (
    COMMENT,
    custom_input,
    event,
    logprobs_of,
    openai_error,
    openai_error_body,
    pieces,
    seconds,
)
from ludic.records import Message, ToolCall, read_messages

_SAMPLED = "the model's own tokens are recorded"
FIELDS: Mapping[str, rules.Rule] = {
    "model": rules.NAME,
    "input": rules.READ,
    "instructions": rules.Rule(accepts=lambda value: isinstance(value, str), wanted="a text", is_recorded=False),
    "previous_response_id": rules.NAME,
    "max_output_tokens": rules.LIMIT,
    "stream": rules.SWITCH,
    "stream_options": rules.READ,
    "tools": rules.READ,
    "tool_choice": rules.READ,
    "text": rules.READ,
    "include": rules.READ,
    "temperature": rules.NUMBER,
    "top_p": rules.NUMBER,
    "top_logprobs": rules.only(0, why="only the logprobs of sampled tokens are kept"),
    "reasoning": rules.OBJECT,
    "parallel_tool_calls": rules.BOOLEAN,
    "max_tool_calls": rules.INTEGER,
    "truncation": rules.only("disabled", why="ludic leaves out no messages", lenient=True),
    "context_management": rules.only([], why="ludic leaves out no messages", lenient=True),
    "background": rules.only(False, why="a call is answered by its own response"),
    "conversation": rules.only(why="send input, or previous_response_id"),
    "prompt": rules.only(why="ludic has no stored prompts"),
    "store": rules.BOOLEAN,
    "metadata": rules.OBJECT,
    "client_metadata": rules.OBJECT,
    "user": rules.TEXT,
    "service_tier": rules.TEXT,
    "safety_identifier": rules.TEXT,
    "prompt_cache_key": rules.TEXT,
    "prompt_cache_options": rules.OBJECT,
    "prompt_cache_retention": rules.TEXT,
}
_ENCRYPTED, _LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_OF_SERVER_TOOLS = ("code_interpreter_call.", "computer_call_output.", "file_search_call.", "web_search_call.")
"""Beginnings of values of `include` that ask for parts of items which ludic never has."""
THINKING = "ludic:"
"""Beginning of encrypted_content, which is the thinking as text."""


def read(body: bytes, *, lenient: bool = False, names: Collection[str] = ()) -> CallRequest:
    """Return the call that a body asks for; as in DialectModule."""
    fields = rules.read_fields(body, FIELDS, "responses", lenient=lenient, names=names)
    tools, kinds = _read_tools(fields)
    choice = fields.get("tool_choice")
    if not rules.only_auto(fields, choice, choice.get("type") if isinstance(choice, dict) else choice):
        tools, kinds = [], {}
    includes = _read_include(fields)
    _read_text(fields)
    options = rules.known_fields(fields, fields.get("stream_options", {}), ("include_obfuscation",), "stream_options")
    fields.asked.update({f"stream_options.{name}": value for name, value in options.items()})
    return CallRequest(
        dialect="responses",
        model=fields.get("model"),
        messages=_read_messages(fields),
        tools=tuple(tools),
        tool_kinds=kinds,
        max_tokens=fields.get("max_output_tokens"),
        stream=fields.get("stream", False),
        previous_id=_read_previous(fields),
        asks_logprobs=_LOGPROBS in includes,
        asked=fields.asked,
        treated=tuple(fields.treated),
    )


def continued(request: CallRequest, earlier: StoredCall) -> CallRequest:
    """Return a request that holds the whole conversation. earlier: the call that its previous_id names.

    System messages at its beginning, such as `instructions`, replace those of the earlier call. Raises RefusedCallError
    for a result of a call that was not made.
    """
    new = request.messages
    num_system, num_before = (sum(1 for _ in takewhile(_is_system, each)) for each in (new, earlier.messages))
    before = earlier.messages[num_before if num_system else 0 :]
    try:
        # Also puts results in the order of their calls, which the request alone does not have.
        read = read_messages([*new[:num_system], *before, earlier.answer, *new[num_system:]], "input")
    except RefusedRecordError as error:
        raise refused("invalid", str(error), field="input") from None
    return replace(request, messages=read.messages, previous_id=None)


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _read_previous(fields: rules.Fields) -> str | None:
    name = fields.get("previous_response_id")
    if name is not None and not name.startswith("resp_"):
        raise rules.wrong("previous_response_id", name, "the id of an earlier response of this episode, resp_...")
    return name and name.removeprefix("resp_")


def _read_include(fields: rules.Fields) -> list[str]:
    includes = fields.get("include", [])
    if not isinstance(includes, list):
        raise rules.wrong("include", includes, "a list of texts")
    for each in includes:
        if each not in (_ENCRYPTED, _LOGPROBS) and not str(each).startswith(_OF_SERVER_TOOLS):
            raise rules.wrong("include", each, f"{_ENCRYPTED} or {_LOGPROBS}", reason="not_recordable")
    if includes:
        fields.asked["include"] = includes
    return includes


def _read_text(fields: rules.Fields) -> None:
    """Record the verbosity; a format is not enforced."""
    text = fields.get("text", {})
    if not isinstance(text, dict):
        raise rules.wrong("text", text, "an object")
    found = rules.known_fields(fields, text, ("format", "verbosity"), "text")
    if found.get("format", {"type": "text"}) != {"type": "text"}:
        fields.treat("text.format", found["format"], f'{{"type": "text"}}; {_SAMPLED}')
    if "verbosity" in found:
        fields.asked["text.verbosity"] = found["verbosity"]


# --- Tools -----------------------------------------------------------------------------------------------------------


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool as the model sees it: unique in all namespaces."""
    return f"{(namespace or '').removesuffix('__')}__{name}" if namespace else name


def _read_tools(fields: rules.Fields) -> tuple[list[dict[str, Any]], dict[str, Mapping[str, Any]]]:
    tools: list[dict[str, Any]] = []
    kinds: dict[str, Mapping[str, Any]] = {}
    for at, tool in rules.tool_list(fields):
        if tool.get("type") != "namespace":
            _add_tool(fields, tool, at, tools, kinds)
            continue
        group = rules.known_fields(fields, tool, ("type", "name", "description", "tools"), at)
        if not isinstance(group.get("name"), str) or not group["name"]:
            raise rules.wrong(f"{at}.name", group.get("name"), "the name of the namespace")
        if not isinstance(group.get("description"), str | None):
            raise rules.wrong(f"{at}.description", group["description"], "a text")
        if not isinstance(group.get("tools"), list):
            raise rules.wrong(f"{at}.tools", group.get("tools"), "a list of tools")
        for number, each in enumerate(group["tools"]):
            _add_tool(fields, each, f"{at}.tools[{number}]", tools, kinds, group)
    rules.refuse_same_names(tools)
    return tools, kinds


def _add_tool(
    fields: rules.Fields,
    tool: Any,
    at: str,
    tools: list[dict[str, Any]],
    kinds: dict[str, Mapping[str, Any]],
    group: Mapping[str, Any] | None = None,
) -> None:
    """Add the schema of a tool, and its kind if it is not a plain function. group: its namespace."""
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if kind == "function":
        schema = rules.function_tool(fields, tool, at, ("parameters", "output_schema", "strict"))
    elif kind == "custom":
        schema = rules.custom_tool(fields, tool, at)
    else:
        wanted = "function, custom or namespace; ludic runs no tools of a server"
        fields.treat(f"{at}.type", kind, wanted)
        return
    function = schema["function"]
    if group is not None:
        kinds[flat_name(group["name"], function["name"])] = {
            "type": kind, "namespace": group["name"], "name": function["name"],
        }  # fmt: skip
        function["name"] = flat_name(group["name"], function["name"])
        about = [*filter(None, [group.get("description"), function.get("description")])]
        if about:
            function["description"] = "\n\n".join(about)
    elif kind == "custom":
        kinds[function["name"]] = {"type": kind}
    tools.append(schema)


# --- Items -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Turns:
    """Messages in the form of chat, to which items are added."""

    values: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Of the first item of each message."""
    is_open: bool = False
    """Whether the last message is of the assistant, and its next items belong to it."""

    def add(self, value: dict[str, Any], at: str) -> None:
        """Add a message that items of an answer may extend, if it is of the assistant."""
        self.values.append(value)
        self.names.append(at)
        self.is_open = value["role"] == "assistant"

    def extend(self, at: str, name: str, value: Any, behind: Collection[str]) -> None:
        """Add a part of an answer. behind: names of the parts that come later in a message than this one."""
        if not (self.is_open and not self.values[-1].keys() & {name, *behind}):
            self.add({"role": "assistant"}, at)
        self.values[-1][name] = value

    def call(self, at: str, value: dict[str, Any]) -> None:
        """Add a tool call."""
        if not self.is_open:
            self.add({"role": "assistant"}, at)
        self.values[-1].setdefault("tool_calls", []).append(value)


def _read_messages(fields: rules.Fields) -> tuple[Message, ...]:
    turns = _Turns()
    items = fields.get("input")
    if isinstance(items, str):
        turns.add({"role": "user", "content": items}, "input")
    elif isinstance(items, list) and len(items) > rules.MAX_ITEMS:
        sentence = f"input has {len(items):,} items, wanted at most {rules.MAX_ITEMS:,}"
        raise rules.refused("invalid", sentence, field="input")
    elif isinstance(items, list) and items:
        for number, item in enumerate(items):
            _read_item(fields, item, f"input[{number}]", turns)
    else:
        raise rules.wrong("input", items, "a text, or a list of items that is not empty")
    messages = rules.conversation(fields, turns.values, "input", turns.names)
    # Behind previous_response_id the first item may be the result of a call, which no message may precede.
    instructions = fields.get("instructions")
    return (Message(role="system", content=instructions), *messages) if instructions else messages


def _read_item(fields: rules.Fields, item: Any, at: str, turns: _Turns) -> None:
    if not isinstance(item, dict):
        raise rules.wrong(at, item, "an item, which is an object with a type")
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise rules.wrong(f"{at}.type", kind, f"one of {', '.join(_ITEMS)}; send the items themselves, as text")
    known, read_item = _ITEMS[kind]
    read_item(rules.known_fields(fields, item, known, at), at, turns)


def _message_item(item: Mapping[str, Any], at: str, turns: _Turns) -> None:
    if item.get("role") == "assistant":
        turns.extend(at, "content", item.get("content"), ("tool_calls",))
    else:
        turns.add({"role": item.get("role"), "content": item.get("content")}, at)


def _reasoning_item(item: Mapping[str, Any], at: str, turns: _Turns) -> None:
    encrypted = item.get("encrypted_content")
    if encrypted is None:
        text = "\n".join(_texts(item, "content", at) or _texts(item, "summary", at))
    elif isinstance(encrypted, str) and encrypted.startswith(THINKING):
        text = encrypted.removeprefix(THINKING)
    else:
        wanted = "null, or what a response of ludic had: thinking that another server encrypted can't be read"
        raise rules.wrong(f"{at}.encrypted_content", encrypted, wanted, reason="not_recordable")
    if text:
        turns.extend(at, "reasoning_content", text, ("content", "tool_calls"))


def _texts(item: Mapping[str, Any], name: str, at: str) -> list[str]:
    """Return the texts of a list of parts."""
    parts = item.get(name, [])
    if not isinstance(parts, list):
        raise rules.wrong(f"{at}.{name}", parts, "a list of parts of text")
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise rules.wrong(f"{at}.{name}", part, "an object with type and text")
    return [part["text"] for part in parts]


def _call_item(item: Mapping[str, Any], at: str, turns: _Turns) -> None:
    """Add a call of a function, or of a custom tool, which has an input."""
    for name in ("call_id", "name"):
        if not isinstance(item.get(name), str) or not item[name]:
            raise rules.wrong(f"{at}.{name}", item.get(name), "a text")
    if not isinstance(item.get("namespace"), str | None):
        raise rules.wrong(f"{at}.namespace", item["namespace"], "a text")
    kind, text = ("custom", "input") if "input" in item else ("function", "arguments")
    called = {"name": flat_name(item.get("namespace"), item["name"]), text: item.get(text)}
    turns.call(at, {"id": item["call_id"], "type": kind, kind: called})


def _output_item(item: Mapping[str, Any], at: str, turns: _Turns) -> None:
    if not isinstance(item.get("call_id"), str):
        raise rules.wrong(f"{at}.call_id", item.get("call_id"), "the call_id of a call")
    turns.add({"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")}, at)


_Read = Callable[[Mapping[str, Any], str, _Turns], None]
_ITEMS: Mapping[str, tuple[tuple[str, ...], _Read]] = {
    "message": (("role", "content"), _message_item),
    "reasoning": (("summary", "content", "encrypted_content"), _reasoning_item),
    "function_call": (("call_id", "name", "namespace", "arguments"), _call_item),
    "function_call_output": (("call_id", "output"), _output_item),
    "custom_tool_call": (("call_id", "name", "namespace", "input"), _call_item),
    "custom_tool_call_output": (("call_id", "output"), _output_item),
}
"""Types of items, with their fields and the function that reads them."""


# --- The response ----------------------------------------------------------------------------------------------------


def _items(answer: Answer, request: CallRequest) -> Iterator[dict[str, Any]]:
    said = answer.message
    if said.reasoning is not None:
        encrypted = THINKING + said.reasoning if _ENCRYPTED in request.asked.get("include", ()) else None
        summary = [{"type": "summary_text", "text": said.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{answer.call_id}", "summary": summary, "encrypted_content": encrypted}
    # Agents take an answer without a message and calls for one that goes on.
    if said.content or not said.tool_calls:
        logprobs = (logprobs_of(answer) if request.asks_logprobs else None) or []
        text = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": logprobs}
        yield {
            "type": "message", "id": f"msg_{answer.call_id}", "role": "assistant", "status": _status(answer),
            "content": [text],
        }  # fmt: skip
    for call in said.tool_calls:
        yield _call_of(call, request)


def _call_of(call: ToolCall, request: CallRequest) -> dict[str, Any]:
    kind = request.tool_kinds.get(call.name, {})
    named = {"call_id": call.id, "name": kind.get("name", call.name)}
    if "namespace" in kind:
        named["namespace"] = kind["namespace"]
    if kind.get("type") == "custom":
        whole = {"type": "custom_tool_call", "id": f"ctc_{call.id}", "input": custom_input(call)}
    else:
        whole = {"type": "function_call", "id": f"fc_{call.id}", "arguments": call.arguments}
    return whole | named | {"status": "completed"}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _response(answer: Answer, request: CallRequest, items: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return a response object. items: None at the start of a stream."""
    asked = request.asked
    is_cut = items is not None and answer.finish_reason == "length"
    usage = {
        "input_tokens": answer.prompt_length,
        "input_tokens_details": {"cached_tokens": answer.cached_length, "cache_write_tokens": 0},
        "output_tokens": answer.completion_length,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_length + answer.completion_length,
    }
    return {
        "id": f"resp_{answer.call_id}",
        "object": "response",
        "created_at": seconds(answer),
        "status": "in_progress" if items is None else _status(answer),
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": asked.get("metadata", {}),
        "model": answer.model,
        "output": items or [],
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "previous_response_id": request.previous_id and f"resp_{request.previous_id}",
        "reasoning": asked.get("reasoning", {"effort": None, "summary": None}),
        "store": asked.get("store", True),
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice", "auto"),
        # Agents do not read their own tools back, and these may be most of the bytes.
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None if items is None else usage,
    }


def response(answer: Answer, request: CallRequest) -> bytes:
    """Return the body of a response."""
    return msgspec.json.encode(_response(answer, request, [*_items(answer, request)]))


def stream(answer: Answer, request: CallRequest) -> Iterator[bytes]:
    """Yield the events of a response."""
    numbers = count()

    def send(kind: str, data: Mapping[str, Any]) -> bytes:
        kind = f"response.{kind}"
        return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    begun = {"response": _response(answer, request, None)}
    yield send("created", begun)
    yield send("in_progress", begun)
    items = [*_items(answer, request)]
    for index, item in enumerate(items):
        at = {"output_index": index}
        yield send("output_item.added", at | {"item": {**item, **_STARTS[item["type"]]}})
        for kind, data in _PARTS[item["type"]](item):
            yield send(kind, {"item_id": item["id"], **at, **data})
        yield send("output_item.done", at | {"item": item})
    yield send(_status(answer), {"response": _response(answer, request, items)})


_STARTS: Mapping[str, Mapping[str, Any]] = {
    "reasoning": {"summary": [], "encrypted_content": None},
    "message": {"content": [], "status": "in_progress"},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": "", "status": "in_progress"},
}
"""Fields of an item that its events fill."""
_Events = Iterator[tuple[str, dict[str, Any]]]


def _reasoning_events(item: Mapping[str, Any]) -> _Events:
    at, part = {"summary_index": 0}, item["summary"][0]
    yield "reasoning_summary_part.added", at | {"part": part | {"text": ""}}
    for text in pieces(part["text"]):
        yield "reasoning_summary_text.delta", at | {"delta": text}
    yield "reasoning_summary_text.done", at | {"text": part["text"]}
    yield "reasoning_summary_part.done", at | {"part": part}


def _message_events(item: Mapping[str, Any]) -> _Events:
    at, part = {"content_index": 0}, item["content"][0]
    yield "content_part.added", at | {"part": part | {"text": "", "logprobs": []}}
    for text in pieces(part["text"]):
        yield "output_text.delta", at | {"delta": text, "logprobs": []}
    yield "output_text.done", at | {"text": part["text"], "logprobs": part["logprobs"]}
    yield "content_part.done", at | {"part": part}


def _call_events(item: Mapping[str, Any]) -> _Events:
    for text in pieces(item["arguments"]):
        yield "function_call_arguments.delta", {"delta": text}
    yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}


def _custom_call_events(item: Mapping[str, Any]) -> _Events:
    for text in pieces(item["input"]):
        yield "custom_tool_call_input.delta", {"delta": text}
    yield "custom_tool_call_input.done", {"input": item["input"]}


_PARTS: Mapping[str, Callable[[Mapping[str, Any]], _Events]] = {
    "reasoning": _reasoning_events,
    "message": _message_events,
    "function_call": _call_events,
    "custom_tool_call": _custom_call_events,
}


def keep_alive() -> bytes:
    """Return what a stream sends before its first event."""
    return COMMENT


def error(error: RefusedCallError) -> bytes:
    """Return the body of an error."""
    return openai_error_body(error)


def stream_error(error: RefusedCallError) -> bytes:
    """Return the events that end a stream in which only keep-alives were sent.

    SDKs raise for the first event, and agents that read events alone end at the second.
    """
    found = openai_error(error)
    shown = {"type": "error", "sequence_number": 0, "code": found["code"], "message": found["message"], "param": None}
    failed = {
        "object": "response", "status": "failed", "output": [],
        "error": {"code": found["code"] or "invalid_prompt", "message": found["message"]},
    }  # fmt: skip
    return event(shown | {"error": found}, "error") + event(
        {"type": "response.failed", "sequence_number": 1, "response": failed}, "response.failed"
    )
