"""Read messages of conversations as other programs write them, for imports, data sets and questions.

Supported are the fields of OpenAI's chat format, including those from before tools, the parts of Anthropic's content,
and the names that servers and trainers use for the model's thinking and for turns without loss. All known content of a
message is used, or the record is refused with an error that names the field. Unknown fields are counted
(`ReadMessages.unread`).

Pure. Raises RefusedRecordError, which names the field, the value found and the value wanted.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludic.base import read_json, storable
from ludic.errors import RefusedRecordError
from ludic.records.rollout import ROLES, Message, ToolCall

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the model's thinking in a message, also in chat templates; it is a text."""
MARKS = ("weight", "train", "trainable", "loss", "train_on_turn")
"""Names of the mark for training on a turn of the assistant: true, false, 1 or 0."""

MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Names of content that ludic can't train on, in rows, messages and parts; a record with one is refused."""
_MEDIA = frozenset({*MEDIA, "image_url", "input_audio"})

_ROLES = (*ROLES, "function")
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "function_call", "refusal", *REASONING, *MARKS})
_FIELDS_OF_RESULTS = _FIELDS | {"tool_call_id"}
_PARTS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("text", "input_text", "output_text"), frozenset({"text"})),
    "refusal": frozenset({"refusal"}),
    **dict.fromkeys(("thinking", "reasoning"), frozenset({"thinking", "reasoning", "text", "redacted"})),
    "tool_use": frozenset({"id", "name", "input"}),
    "tool_result": frozenset({"tool_use_id", "content"}),
}
"""Types of parts of content that are read, with their fields."""
_RANKS = {"thinking": 0, "reasoning": 0, "tool_result": 0, "tool_use": 2}
"""Places of parts in a message: thinking and results, then texts, then calls. Templates show them in this order."""
_CALL = frozenset({"id", "type", "function", "name", "arguments", "result", "error"})
_FUNCTION = frozenset({"name", "arguments"})


def check_text(name: str, text: Any) -> None:
    """Raise RefusedRecordError unless the text can be encoded as UTF-8, which half of a surrogate pair can't."""
    if not isinstance(text, str):
        raise refusal(name, text, "a text")
    if text != storable(text):
        raise refusal(name, text, "text that UTF-8 can hold; it has half of a surrogate pair, as of a cut emoji")


def refusal(name: str, value: Any, wanted: str) -> RefusedRecordError:
    """Return the error for a field with an unusable value."""
    shown = repr(value)
    return RefusedRecordError(f"{name} is {shown if len(shown) <= 60 else shown[:57] + '...'}, wanted {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMessages:
    """A conversation. One message of a file may become several, such as results of tools in a user's message."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    """True if each message is a turn to train on: of the assistant, and not marked otherwise."""
    sources: tuple[int, ...]
    """Index of the file's message that each one is from."""
    unread: Mapping[str, int]
    """Number of messages with an unknown field, by its name, such as messages[].cache_control."""


def read_messages(
    values: Any, name: str = "messages", *, has_tokens: bool = False, names: Sequence[str] = ()
) -> ReadMessages:
    """Read a list of messages, each an object or a Message.

    name: of the field, for errors. has_tokens: whether the tokens of the conversation are known, so that its messages
    are for people to read: they keep their order, and one without content is an empty text. names: of each message, for
    errors, where they are not name[0], name[1] and so on.
    """
    if not isinstance(values, list | tuple):
        raise refusal(name, values, "a list of messages")
    found: list[_Turn] = []
    unread: Counter[str] = Counter()
    names = names or [f"{name}[{number}]" for number in range(len(values))]
    for number, value in enumerate(values):
        unknown: set[str] = set()
        found += (replace(turn, source=number) for turn in _turns(value, names[number], has_tokens, unknown))
        unread.update(f"{name}[].{each}" for each in unknown)
    # ART marks the sampled turns only.
    only_marked = any(turn.mark and turn.marked_by == "trainable" for turn in found)
    turns = found if has_tokens else [*_in_order_of_calls(found, names)]
    return ReadMessages(
        messages=tuple(turn.message for turn in turns),
        trained=tuple(_is_trained(turn, only_marked) for turn in turns),
        sources=tuple(turn.source for turn in turns),
        unread=unread,
    )


def to_message(value: Any) -> Message:
    """Return a message. Raises RefusedRecordError also if it would become several."""
    found = read_messages([value]).messages
    if len(found) != 1:
        raise refusal("messages[0]", value, f"one message; it holds {len(found)}")
    return found[0]


def marked(messages: Sequence[Mapping[str, Any]], *, trained: bool) -> list[dict[str, Any]]:
    """Return messages with a single mark, `trainable`, which is true for the turns whose own marks allow training.

    Without `trained` it is true for none. Raises RefusedRecordError as `read_messages` does.
    """
    read = read_messages(messages)
    turns = {source for source, is_trained in zip(read.sources, read.trained, strict=True) if is_trained and trained}
    unmarked = ({name: value for name, value in each.items() if name not in MARKS} for each in messages)
    return [{**each, "trainable": number in turns} for number, each in enumerate(unmarked)]


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return schemas of tools, a list or its JSON text, in OpenAI's form; empty for null.

    Schemas of Anthropic, with input_schema, are converted, and those of functions alone (name, parameters) wrapped.
    """
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        tools = value
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise refusal("tools", value, "a list of the tools' JSON schemas, or its JSON text")
    return [_schema(tool) for tool in tools]


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in OpenAI's form; a schema in an unknown form is unchanged."""
    found = {name: value for name, value in tool.items() if value is not None}
    if "function" in found or "name" not in found or found.get("type", "function") not in ("function", "custom"):
        return dict(tool)
    if "input_schema" in found and "parameters" in found:
        raise RefusedRecordError(f"tools has {found['name']!r} with input_schema and parameters, wanted one of them")
    named = (("parameters" if name == "input_schema" else name, value) for name, value in found.items())
    return {"type": "function", "function": {name: value for name, value in named if name != "type"}}


# --- A message -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    message: Message
    mark: bool | None = None
    marked_by: str = ""
    """Name of the field with the mark."""
    source: int = 0


def _is_trained(turn: _Turn, only_marked: bool) -> bool:
    is_default = turn.message.role == "assistant" and not only_marked
    return is_default if turn.mark is None else turn.mark


@dataclass(slots=True)
class _Content:
    """The content of a message, by kind."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)

    @property
    def text(self) -> str | None:
        # As vLLM joins parts for a template that wants a text.
        return "\n".join(self.texts) if self.texts else None


def _turns(value: Any, at: str, has_tokens: bool, unread: set[str]) -> Iterator[_Turn]:
    """Yield the messages in one message of a file. unread: gets the names of its unknown fields."""
    if isinstance(value, Message):
        yield _Turn(_checked(value, at))
        return
    if not isinstance(value, Mapping):
        raise refusal(at, value, "an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refusal(f"{at}.role", role, f"one of {', '.join(ROLES)}")
    is_result = role in ("tool", "function")
    _refuse_media(value, at)
    _note_unknown(value, _FIELDS_OF_RESULTS if is_result else _FIELDS, "", unread)
    content = _read_content(value.get("content"), f"{at}.content", unread)
    refused = _text(value, "refusal", at) or None
    if refused is not None and content.text:
        raise RefusedRecordError(f"{at} has content and a refusal, wanted one of them")
    text = content.text if refused is None else refused
    calls = (*content.calls, *_read_calls(value, at, unread))
    if not has_tokens:
        _check_arguments(calls, at)
    reasoning = _read_reasoning(value, content, at)
    _check_role(role, at, {"tool_calls": calls, "reasoning": reasoning, "refusal": refused}, content.results)
    mark = _read_mark(value, at, role)
    yield from map(_Turn, content.results)
    if text is None and content.results:
        return
    if text is None and not (has_tokens or calls or reasoning):
        raise RefusedRecordError(f"{at} has no content, wanted a text, which may be empty")
    message = Message(
        role="tool" if role == "function" else role,
        content=text or "",
        name=_text(value, "name", at),
        tool_calls=calls,
        reasoning=reasoning if role == "assistant" else None,
        tool_call_id=_text(value, "tool_call_id", at) if is_result else None,
    )
    yield _Turn(_checked(message, at), *mark)


def _checked(message: Message, at: str) -> Message:
    """Return a message whose texts can be stored. Raises RefusedRecordError for others."""
    if message.role not in ROLES:
        raise refusal(f"{at}.role", message.role, f"one of {', '.join(ROLES)}")
    texts = {"content": message.content, "name": message.name, "reasoning": message.reasoning}
    for number, call in enumerate(message.tool_calls):
        texts |= {f"tool_calls[{number}].{name}": getattr(call, name) for name in ("id", "name", "arguments")}
    for name, text in texts.items():
        if text is not None or name == "content":
            check_text(f"{at}.{name}", text)
    return message


def _check_role(role: str, at: str, of_assistant: Mapping[str, Any], results: Sequence[Message]) -> None:
    for name, value in of_assistant.items():
        if value and role != "assistant":
            raise RefusedRecordError(f"{at} has {name} and the role {role}; only the assistant has {name}")
    if results and role != "user":
        raise RefusedRecordError(f"{at}.content has a tool_result and the role {role}, wanted the role user")


def _refuse_media(value: Mapping[str, Any], at: str) -> None:
    for name in _MEDIA & value.keys():
        if value[name] not in (None, [], {}, ""):
            raise refusal(f"{at}.{name}", value[name], "none; ludic trains on text")


def _note_unknown(value: Mapping[str, Any], known: Iterable[str], prefix: str, unread: set[str]) -> None:
    unread.update(f"{prefix}{name}" for name in value.keys() - known if value[name] not in (None, [], {}))


def _text(value: Mapping[str, Any], name: str, at: str) -> str | None:
    text = value.get(name)
    if text is not None and not isinstance(text, str):
        raise refusal(f"{at}.{name}", text, "a text")
    return text


def _read_mark(value: Mapping[str, Any], at: str, role: str) -> tuple[bool | None, str]:
    """Return whether a turn is marked for training, None without a mark, and the name of the mark."""
    found = {name: value[name] for name in MARKS if value.get(name) is not None}
    for name, mark in found.items():
        if mark not in (0, 1):
            raise refusal(f"{at}.{name}", mark, "0 or 1" if name == "weight" else "true or false")
        if mark and role != "assistant":
            raise refusal(f"{at}.{name}", mark, f"none for the role {role}; only turns of the assistant are trained on")
    if len(set(map(bool, found.values()))) > 1:
        raise RefusedRecordError(f"{at} has {' and '.join(f'{name} {mark!r}' for name, mark in found.items())}")
    return (bool(next(iter(found.values()))), [*found][-1]) if found else (None, "")


def _read_reasoning(value: Mapping[str, Any], content: _Content, at: str) -> str | None:
    found = {name: text for name in REASONING if (text := _text(value, name, at)) is not None}
    if content.thoughts:
        found["content"] = "\n".join(content.thoughts)
    if len(set(found.values())) > 1:
        raise RefusedRecordError(f"{at} has different texts in {' and '.join(found)}, wanted one text of thinking")
    return next(iter(found.values()), None)


# --- Content ---------------------------------------------------------------------------------------------------------


def _read_content(value: Any, at: str, unread: set[str]) -> _Content:
    """Read a text, or a list of parts: texts are joined by newlines."""
    content = _Content()
    if isinstance(value, str):
        content.texts.append(value)
    elif isinstance(value, list | tuple):
        rank = 0
        for number, part in enumerate(value):
            kind = _read_part(part, f"{at}[{number}]", content, unread)
            if _RANKS.get(kind, 1) < rank:
                wanted = "thinking and results of tools first, then texts, then calls"
                raise RefusedRecordError(f"{at}[{number}] is {kind} behind other parts, wanted {wanted}")
            rank = _RANKS.get(kind, 1)
    elif value is not None:
        raise refusal(at, value, "a text, or a list of parts")
    return content


def _read_part(part: Any, at: str, content: _Content, unread: set[str]) -> str:
    """Add a part to the content, and return its type."""
    if not isinstance(part, Mapping):
        raise refusal(at, part, "an object with type and text")
    kind = part.get("type")
    if kind is None and part.get("text") is not None:
        kind = "text"
    if not isinstance(kind, str) or kind not in _PARTS:
        raise refusal(f"{at}.type", kind, f"one of {', '.join(_PARTS)}; ludic trains on text")
    _refuse_media(part, at)
    _note_unknown(part, _PARTS[kind] | {"type"}, "content[].", unread)
    match kind:
        case "thinking" | "reasoning":
            if part.get("redacted"):
                raise RefusedRecordError(f"{at} is redacted, wanted thinking as text")
            content.thoughts.append(_first_text(part, ("thinking", "reasoning", "text"), kind, at))
        case "tool_use":
            if not isinstance(part.get("input"), Mapping | None):
                raise refusal(f"{at}.input", part["input"], "an object")
            content.calls.append(_tool_call(part, part.get("input"), at, "input"))
        case "tool_result":
            content.results.append(_tool_result(part, at, unread))
        case "refusal":
            content.texts.append(_first_text(part, ("refusal",), kind, at))
        case _:
            content.texts.append(_first_text(part, ("text",), "text", at))
    return kind


def _first_text(part: Mapping[str, Any], names: Sequence[str], wanted: str, at: str) -> str:
    found = [text for name in names if (text := _text(part, name, at)) is not None]
    if len(set(found)) != 1:
        raise RefusedRecordError(f"{at} has {len(set(found)) or 'no'} texts of {wanted}, wanted one")
    return found[0]


def _tool_result(part: Mapping[str, Any], at: str, unread: set[str]) -> Message:
    """Return the message of a result; without content its text is empty, as in Anthropic's format."""
    inner = _read_content(part.get("content"), f"{at}.content", unread)
    if inner.thoughts or inner.calls or inner.results:
        raise refusal(f"{at}.content", part.get("content"), "a text, or parts of text")
    return _checked(Message(role="tool", content=inner.text or "", tool_call_id=_text(part, "tool_use_id", at)), at)


# --- Tool calls ------------------------------------------------------------------------------------------------------


def _read_calls(value: Mapping[str, Any], at: str, unread: set[str]) -> Iterator[ToolCall]:
    """Yield the calls in tool_calls, which may be JSON text, or the one in function_call."""
    calls, old, at_calls = value.get("tool_calls"), value.get("function_call"), f"{at}.tool_calls"
    try:
        listed = json.loads(calls) if isinstance(calls, str) else calls
    except (ValueError, RecursionError) as error:
        raise refusal(at_calls, calls, f"a list of tool calls; as JSON text it is broken: {error}") from None
    if not isinstance(listed, list | tuple | None):
        raise refusal(at_calls, calls, "a list of tool calls")
    if old is not None and listed:
        raise RefusedRecordError(f"{at} has tool_calls and function_call, wanted one of them")
    for number, call in enumerate(listed or ()):
        yield _read_call(call, f"{at_calls}[{number}]", unread)
    if old is not None:
        if not isinstance(old, Mapping):
            raise refusal(f"{at}.function_call", old, "an object with name and arguments")
        _note_unknown(old, _FUNCTION, "function_call.", unread)
        yield _tool_call(old, old.get("arguments"), f"{at}.function_call", "arguments")


def _read_call(call: Any, at: str, unread: set[str]) -> ToolCall:
    """Return a call of OpenAI's format, or one whose name and arguments are not in an object `function`."""
    if not isinstance(call, Mapping):
        raise refusal(at, call, "an object with id and function")
    if call.get("type") == "custom":
        return _custom_call(call, at, unread)
    if call.get("type") not in (None, "function"):
        raise refusal(f"{at}.type", call["type"], "function or custom")
    _note_unknown(call, _CALL, "tool_calls[].", unread)
    function = call.get("function")
    if function is None:
        return _tool_call(call, call.get("arguments"), at, "arguments")
    if not isinstance(function, Mapping):
        raise refusal(f"{at}.function", function, "an object with name and arguments")
    _note_unknown(function, _FUNCTION, "tool_calls[].function.", unread)
    whole = {**call, "name": function.get("name")}
    return _tool_call(whole, function.get("arguments"), f"{at}", "function.arguments")


def _custom_call(call: Mapping[str, Any], at: str, unread: set[str]) -> ToolCall:
    """Return a call of a custom tool of OpenAI, whose input is a free text; it becomes the argument `input`."""
    _note_unknown(call, {"id", "type", "custom"}, "tool_calls[].", unread)
    custom = call.get("custom")
    if not isinstance(custom, Mapping):
        raise refusal(f"{at}.custom", custom, "an object with name and input")
    _note_unknown(custom, {"name", "input"}, "tool_calls[].custom.", unread)
    called = {"id": call.get("id"), "name": custom.get("name")}
    return _tool_call(called, {"input": _first_text(custom, ("input",), "input", at)}, at, "custom.input")


def _tool_call(call: Mapping[str, Any], arguments: Any, at: str, name: str) -> ToolCall:
    """Return a call. arguments: JSON text, or an object; null and a blank text are no arguments."""
    if not isinstance(arguments, str | Mapping | None):
        raise refusal(f"{at}.{name}", arguments, "an object, or its JSON text")
    called = _text(call, "name", at)
    if not called:
        raise RefusedRecordError(f"{at} has no name, wanted that of the tool")
    try:
        text = (
            arguments
            if isinstance(arguments, str)
            else json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        )
    except (TypeError, ValueError, RecursionError):
        raise refusal(f"{at}.{name}", arguments, "what JSON can hold") from None
    return ToolCall(
        id=_text(call, "id", at) or "",
        name=called,
        arguments=text if text.strip() else "{}",
        result=_text(call, "result", at),
        error=_text(call, "error", at),
    )


def _check_arguments(calls: Iterable[ToolCall], at: str) -> None:
    """Raise RefusedRecordError for arguments that are not an object: a template would show them as a text."""
    for number, call in enumerate(calls):
        try:
            is_object = isinstance(read_json(call.arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            wanted = "an object, or its JSON text"
            raise refusal(f"{at}.tool_calls[{number}].function.arguments", call.arguments, wanted)


def _in_order_of_calls(turns: Sequence[_Turn], names: Sequence[str]) -> Iterator[_Turn]:
    """Yield turns with the results of tools in the order of their calls, as in a worker's dialogue.

    Templates show results without ids, so a model distinguishes them by their order. A result without an id is that of
    the next call that has none. names: of the messages. Raises RefusedRecordError for a result of a call that was not
    made.
    """
    start = 0
    while start < len(turns):
        calls = [call.id for call in turns[start].message.tool_calls]
        end = start + 1
        while calls and end < len(turns) and turns[end].message.role == "tool":
            end += 1
        # After an answer without calls it is the result of a call in the answer's text.
        before = turns[start - 1].message.role if start else "tool"
        if turns[start].message.role == "tool" and before not in ("assistant", "tool"):
            at = names[turns[start].source]
            raise RefusedRecordError(f"{at} is the result of a tool behind {before}, wanted it behind the call")
        yield turns[start]
        yield from _placed(turns[start + 1 : end], calls, names[turns[start].source], names)
        start = end


def _placed(results: Sequence[_Turn], calls: Sequence[str], caller: str, names: Sequence[str]) -> list[_Turn]:
    """Return results in the order of the calls. caller: the message of the calls, for errors."""
    of_calls: dict[int, _Turn] = {}
    without: list[_Turn] = []
    for turn in results:
        of_call, at = turn.message.tool_call_id, f"{names[turn.source]}.tool_call_id"
        if of_call is None or (of_call not in calls and not all(calls)):
            without.append(turn)
            continue
        index = next((each for each, id_ in enumerate(calls) if id_ == of_call and each not in of_calls), None)
        if index is None:
            wanted = f"the id of a call of {caller} that has no result before it: {', '.join(calls)}"
            raise refusal(at, of_call, wanted)
        of_calls[index] = turn
    free = (index for index in range(len(calls)) if index not in of_calls)
    for turn in without:
        index = next(free, None)
        if index is None:
            raise RefusedRecordError(f"{names[turn.source]} is one more result than {caller} has calls")
        of_calls[index] = turn
    return [of_calls[index] for index in sorted(of_calls)]
