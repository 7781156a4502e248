"""Read messages of conversations as other programs write them. Every reader of messages in ludic is this one.

Pure. Raises RefusedRecordError, whose text names the field, the value that was found, and what was wanted.
"""

import json
from collections.abc import Mapping
from typing import Any

from ludic.errors import RefusedRecordError
from ludic.records import Message, ToolCall


def refusal(name: str, value: Any, wanted: str) -> RefusedRecordError:
    """Return the error for a field with an unusable value."""
    shown = repr(value)
    return RefusedRecordError(f"{name} is {shown if len(shown) <= 60 else shown[:57] + '...'}, wanted {wanted}")


def to_messages(name: str, values: Any) -> tuple[Message, ...]:
    """Return a list of messages. name: of the field, for errors."""
    if not isinstance(values, list | tuple):
        raise refusal(name, values, "text or a list of messages" if name == "the prompt" else "a list of messages")
    return tuple(value if isinstance(value, Message) else to_message(value) for value in values)


def to_message(value: Any) -> Message:
    """Convert a message of OpenAI's chat format or of verifiers; tool calls may be JSON text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise RefusedRecordError(f"a message is {str(value)[:60]!r}, wanted an object with role and content")
    calls, name = value.get("tool_calls") or [], value.get("name")
    try:
        tool_calls = tuple(map(_to_tool_call, json.loads(calls) if isinstance(calls, str) else calls))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise RefusedRecordError(f"tool_calls of a message is {str(calls)[:60]!r}: {error}") from error
    return Message(
        role=value["role"],
        content=_content_text(value.get("content")),
        name=name if isinstance(name, str) else None,
        tool_calls=tool_calls,
        reasoning=value.get("reasoning_content"),
    )


def _to_tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function", call)
    arguments = function["arguments"]
    return ToolCall(
        id=str(call.get("id", "")),
        name=function["name"],
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
        result=call.get("result"),
        error=call.get("error"),
    )


def _content_text(content: Any) -> str:
    """Return the text of a message, or of its parts joined by newlines; images are left out."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and part.get("text") is not None)
