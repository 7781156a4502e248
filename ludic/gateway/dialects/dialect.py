"""Name the modules of the dialects and the functions that each has; answer calls that are alike in all dialects."""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from ludic.gateway.calls import Answer, CallRequest, Dialect, RefusedCallError
from ludic.gateway.dialects import chat, completions, messages, responses


class DialectModule(Protocol):
    """The functions of a dialect."""

    def read(self, body: bytes, *, lenient: bool = False, names: Collection[str] = ()) -> CallRequest:
        """Return the call that a body asks for.

        lenient: treat response_format and a required tool choice as auto, leave out tools that only another server
        runs, and accept any model's name; `CallRequest.treated` names what was. names: of the models that exist; empty
        for any. Raises RefusedCallError, which names the field, what was found and what was wanted.
        """
        ...

    def response(self, answer: Answer, request: CallRequest) -> bytes:
        """Return the body of a response."""
        ...

    def stream(self, answer: Answer, request: CallRequest) -> Iterator[bytes]:
        """Yield the server-sent events of a response; together they hold what `response` has."""
        ...

    def keep_alive(self) -> bytes:
        """Return what a stream sends before its first event, for clients that wait for bytes."""
        ...

    def error(self, error: RefusedCallError) -> bytes:
        """Return the body of a response whose status is STATUS[error.reason]."""
        ...

    def stream_error(self, error: RefusedCallError) -> bytes:
        """Return the events that end a stream in which only keep-alives were sent."""
        ...


DIALECTS: Mapping[Dialect, DialectModule] = MappingProxyType(
    {"chat": chat, "completions": completions, "responses": responses, "messages": messages}
)


def models(names: Collection[str]) -> bytes:
    """Return the body of GET /v1/models: one list with the fields of OpenAI and of Anthropic."""
    data = [
        {
            "id": name,
            "object": "model",
            "type": "model",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "display_name": name,
            "owned_by": "ludic",
        }
        for name in names
    ]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return msgspec.json.encode({"object": "list", "data": data, "has_more": False, **ends})


def count_tokens(num_tokens: int) -> bytes:
    """Return the body of POST /v1/messages/count_tokens, for the tokens of a rendered prompt."""
    return msgspec.json.encode({"input_tokens": num_tokens})
