"""Write what the responses of the dialects share: events of streams, pieces of texts, usage, errors. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ludic.base import read_json
from ludic.gateway.calls import Answer, RefusalReason, RefusedCallError
from ludic.records import ToolCall

PIECE = 4_000
"""Maximum characters of a delta; clients that read lines of at most 64 KiB can read it, even fully escaped."""
COMMENT = b": keep-alive\n\n"
"""Keep-alive of OpenAI's streams; readers of server-sent events skip comments."""
DONE = b"data: [DONE]\n\n"

_LINE_ENDS = {"\u2028": b"\\u2028", "\u2029": b"\\u2029", "\x85": b"\\u0085"}
"""Characters that JSON may hold unescaped, and at which Python's splitlines, which some clients use, ends a line."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event. name: of the event, for APIs that name them."""
    line = msgspec.json.encode(data)
    for character, escaped in _LINE_ENDS.items():
        line = line.replace(character.encode(), escaped)
    return (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + line + b"\n\n"


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most PIECE characters; none cuts a character in two."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def seconds(answer: Answer) -> int:
    """Return the time of an answer in seconds since 1970."""
    return int(answer.created_at.timestamp())


def openai_usage(answer: Answer) -> dict[str, Any]:
    """Return the usage of chat completions and completions."""
    return {
        "prompt_tokens": answer.prompt_length,
        "completion_tokens": answer.completion_length,
        "total_tokens": answer.prompt_length + answer.completion_length,
        "prompt_tokens_details": {"cached_tokens": answer.cached_length},
    }


def logprobs_of(answer: Answer) -> list[dict[str, Any]] | None:
    """Return the logprobs of the tokens in OpenAI's form; None if they are not captured."""
    if answer.token_texts is None or answer.token_logprobs is None:
        return None
    tokens = zip(answer.token_texts, answer.token_logprobs.tolist(), strict=True)
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in tokens
    ]


def custom_input(call: ToolCall) -> str:
    """Return the input of a call of a custom tool; all its arguments if the model called it as another function."""
    try:
        arguments = read_json(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    text = arguments.get("input") if isinstance(arguments, dict) and len(arguments) == 1 else None
    return text if isinstance(text, str) else call.arguments


_OPENAI: Mapping[RefusalReason, tuple[str, str | None]] = {
    "invalid": ("invalid_request_error", None),
    "too_long": ("invalid_request_error", "context_length_exceeded"),
    "not_recordable": ("invalid_request_error", "unsupported_parameter"),
    "wrong_key": ("authentication_error", "invalid_api_key"),
    "unknown_model": ("invalid_request_error", "model_not_found"),
    "not_found": ("invalid_request_error", "not_found"),
    "sealed": ("invalid_request_error", "episode_sealed"),
    "elsewhere": ("invalid_request_error", "episode_elsewhere"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "full": ("rate_limit_error", "rate_limit_exceeded"),
    "stopping": ("server_error", "server_stopping"),
    "upstream": ("server_error", "upstream_error"),
    "engine": ("server_error", "engine_error"),
}
"""Type and code of OpenAI's errors."""


def openai_error(error: RefusedCallError) -> dict[str, Any]:
    """Return the error object of OpenAI's APIs; `owner` is the address of the gateway that has the episode."""
    kind, code = _OPENAI[error.reason]
    owner = {} if error.owner is None else {"owner": error.owner}
    return {"message": str(error), "type": kind, "param": error.field, "code": code, **owner}


def openai_error_body(error: RefusedCallError) -> bytes:
    """Return the body of an error of OpenAI's APIs."""
    return msgspec.json.encode({"error": openai_error(error)})
