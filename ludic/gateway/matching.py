"""Compare conversations whatever clients change in answers; find the earlier call of an episode that one continues.

Clients send a whole conversation with each call, and return an answer changed: without its thinking, or with it in the
content; with arguments as other JSON text; with other blanks around it; with a name, or other ids of tool calls.
Messages are compared without these. All else must be equal. Pure; no I/O.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from ludic.agents import split_thinking
from ludic.base import read_json
from ludic.gateway.calls import StoredCall
from ludic.records import Message
from ludic.root.rows import prompt_digest

Comparable = tuple[str, ...]
"""A message as it is compared."""
_SIZE = 16
_ends: WeakKeyDictionary[StoredCall, tuple[int, bytes]] = WeakKeyDictionary()
"""Number and digest of the messages and the answer of stored calls."""


def _normalised(message: Message, call_number: int | None = None) -> Comparable:
    """Return a message without what clients change.

    call_number: position of the tool call that the message answers among those of the answer before; None if it is not
    known.
    """
    if message.role == "assistant":
        content = _parts(message)[1].strip()
        calls = [text for call in message.tool_calls for text in (call.name, _comparable_json(call.arguments))]
        return (message.role, content, *calls)
    if message.role == "tool":
        return (message.role, message.content, "" if call_number is None else str(call_number))
    return (message.role, message.content, message.name or "")


def same_thinking(one: Message, other: Message) -> bool:
    """Return whether two answers may be the same, judged by their thinking, which clients may drop or move."""
    thinking, others = (_parts(each)[0] for each in (one, other))
    return not thinking or not others or thinking == others


def _parts(message: Message) -> tuple[str, str]:
    """Return the thinking of an answer, empty if it has none, and its text after the thinking."""
    thinking, content = split_thinking(message.content, is_thinking=False)
    return (message.reasoning or thinking or "").strip(), content


class SentMessages:
    """Messages of a call, digested once to be compared with those of earlier calls."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._digests = [*beginnings(messages)]
        """By number of messages, of these messages."""

    def longest_known(self, earlier: Iterable[StoredCall]) -> StoredCall | None:
        """Return the call whose messages and answer are the longest beginning of these messages; None if there is none.

        Of several the one of which most messages are equal to these in each detail, such as the ids of tool calls; of
        equals the last of `earlier`.
        """
        beginnings: dict[int, list[StoredCall]] = {}
        for call in earlier:
            number, digest = _end(call)
            if number < len(self._digests) and self._digests[number] == digest:
                beginnings.setdefault(number, []).append(call)
        for number in sorted(beginnings, reverse=True):
            if best := [call for call in beginnings[number] if self._has_thinking(call)]:
                return max(enumerate(best), key=lambda each: (self._num_equal(each[1]), each[0]))[1]
        return None

    def _has_thinking(self, call: StoredCall) -> bool:
        pairs = zip(self.messages, (*call.messages, call.answer), strict=False)
        return all(one.role != "assistant" or same_thinking(one, other) for one, other in pairs)

    def _num_equal(self, call: StoredCall) -> int:
        return sum(one == other for one, other in zip(self.messages, (*call.messages, call.answer), strict=False))


def longest_known(messages: Sequence[Message], earlier: Iterable[StoredCall]) -> tuple[StoredCall, int] | None:
    """Return the call that messages continue, as `SentMessages.longest_known` does, and the number of known
    messages."""
    known = SentMessages(messages).longest_known(earlier)
    return None if known is None else (known, len(known.messages) + 1)


def _end(call: StoredCall) -> tuple[int, bytes]:
    if call not in _ends:
        *_, digest = beginnings((*call.messages, call.answer))
        _ends[call] = len(call.messages) + 1, digest
    return _ends[call]


def beginnings(messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield the digests of the first 0, 1, 2, ... messages, without what clients change; thinking is in none."""
    digest = b""
    yield digest
    positions: dict[str, int] = {}
    number = 0
    for message in messages:
        if message.role == "assistant":
            positions, number = {call.id: index for index, call in enumerate(message.tool_calls)}, 0
        answered: int | None = None
        if message.role == "tool":
            answered, number = positions.get(message.tool_call_id or "", number), number + 1
        hashed = blake2b(digest, digest_size=_SIZE)
        for text in _normalised(message, answered):
            data = text.encode("utf-8", "surrogatepass")
            hashed.update(len(data).to_bytes(8, "big"))
            hashed.update(data)
        digest = hashed.digest()
        yield digest


_LONG = 10_000
"""Characters from which the JSON of arguments is not kept."""


def _comparable_json(arguments: str) -> str:
    return _read_arguments(arguments) if len(arguments) < _LONG else _read_arguments.__wrapped__(arguments)


@lru_cache(maxsize=2048)
def _read_arguments(arguments: str) -> str:
    """Return one JSON text for equal values; text that is not JSON without the blanks around it."""
    try:
        return json.dumps(_as_in_javascript(read_json(arguments or "{}")), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


_LARGEST_EXACT = 2**53


def _as_in_javascript(value: Any) -> Any:
    """Return a JSON value with the numbers that a client in JavaScript would write: 1 for 1.0, rounded large ones."""
    if isinstance(value, dict):
        return {key: _as_in_javascript(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(_as_in_javascript, value)]
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    is_rounded = type(value) is int and abs(value) > _LARGEST_EXACT and value.bit_length() < 1024
    return int(float(value)) if is_rounded else value


def tools_digest(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the digest under which the tools of a call are stored; None without tools."""
    return prompt_digest(tools) if tools else None
