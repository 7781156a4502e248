"""OpenAI's completions: read a request, write its response or stream. Pure; raises RefusedCallError."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from ludic.gateway.calls import Answer, CallRequest, RefusedCallError, refused
from ludic.gateway.dialects import rules
from ludic.gateway.dialects.chat import SAMPLING, includes_usage
from ludic.gateway.dialects.replies import (
    COMMENT,
    DONE,
    event,
    openai_error,
    openai_error_body,
    openai_usage,
    pieces,
    seconds,
)

FIELDS: Mapping[str, rules.Rule] = {
    **SAMPLING,
    "prompt": rules.READ,
    "logprobs": rules.only(0, 1, why="only the logprobs of sampled tokens are kept"),
    "best_of": rules.only(1, why="a call stores one answer"),
    "echo": rules.only(False, why="the answer holds the sampled tokens alone"),
    "suffix": rules.only("", why="the model writes the end of a text only"),
}


def read(body: bytes, *, lenient: bool = False, names: Collection[str] = ()) -> CallRequest:
    """Return the call that a body asks for; as in DialectModule."""
    fields = rules.read_fields(body, FIELDS, "completions", lenient=lenient, names=names)
    # 0 asks for the sampled token alone, and 1 for the likeliest too, which is kept if it was sampled.
    return CallRequest(
        dialect="completions",
        model=fields.get("model"),
        prompt=_read_prompt(fields.get("prompt")),
        max_tokens=fields.get("max_tokens"),
        stop=rules.stop_texts(fields.get("stop")),
        stream=fields.get("stream", False),
        include_usage=includes_usage(fields),
        asks_logprobs=fields.get("logprobs") is not None,
        asked=fields.asked,
        treated=tuple(fields.treated),
    )


def _read_prompt(value: Any) -> str | np.ndarray:
    wanted = "one prompt: a text, or a list of token ids"
    # A list of one prompt is one prompt.
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(rules.is_integer(each) for each in value):
        if min(value) < 0 or max(value) >= 2**31:
            raise rules.wrong("prompt", min(value) if min(value) < 0 else max(value), "token ids from 0 to 2^31 - 1")
        return np.array(value, np.int32)
    if value is None:
        raise refused("invalid", f"prompt is missing, wanted {wanted}", field="prompt")
    raise rules.wrong("prompt", value, wanted)


# --- The response ----------------------------------------------------------------------------------------------------


def _envelope(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.call_id}",
        "object": "text_completion",
        "created": seconds(answer),
        "model": answer.model,
    }


def _choice(text: str, finish_reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(answer: Answer) -> str:
    return "length" if answer.finish_reason == "length" else "stop"


def _logprobs(answer: Answer, request: CallRequest) -> dict[str, Any] | None:
    if not request.asks_logprobs or answer.token_texts is None or answer.token_logprobs is None:
        return None
    offsets = np.cumsum([0, *map(len, answer.token_texts)])[:-1].tolist()
    return {
        "tokens": list(answer.token_texts),
        "token_logprobs": answer.token_logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def response(answer: Answer, request: CallRequest) -> bytes:
    """Return the body of a response."""
    choice = _choice(answer.text, _finish_reason(answer), _logprobs(answer, request))
    return msgspec.json.encode(_envelope(answer) | {"choices": [choice], "usage": openai_usage(answer)})


def stream(answer: Answer, request: CallRequest) -> Iterator[bytes]:
    """Yield the events of a response."""
    envelope = _envelope(answer)
    for text in pieces(answer.text):
        yield event(envelope | {"choices": [_choice(text)]})
    end = _choice("", _finish_reason(answer), _logprobs(answer, request))
    yield event(envelope | {"choices": [end]})
    if request.include_usage:
        yield event(envelope | {"choices": [], "usage": openai_usage(answer)})
    yield DONE


def keep_alive() -> bytes:
    """Return what a stream sends before its first event."""
    return COMMENT


def error(error: RefusedCallError) -> bytes:
    """Return the body of an error."""
    return openai_error_body(error)


def stream_error(error: RefusedCallError) -> bytes:
    """Return the events that end a stream in which only keep-alives were sent."""
    return event({"error": openai_error(error)}) + DONE
