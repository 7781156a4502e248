"""Define one model call on its way through the gateway: request, stored call, sampled answer, refusal.

A dialect (ludic.gateway.dialects) turns the body of an HTTP request into a `CallRequest`, and an `Answer` into the body
or the stream of the response. A `Backend` samples: an engine with a tokenizer, or another server. Pure; no I/O.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

import numpy as np

from ludic.engines import Completion, SamplingParams
from ludic.errors import LudicError
from ludic.records import Capture, Message

Dialect = Literal["chat", "completions", "responses", "messages"]
"""OpenAI chat completions, completions and responses; Anthropic messages."""
RefusalReason = Literal[
    "invalid", "too_long", "not_recordable", "wrong_key", "unknown_model", "not_found", "sealed", "elsewhere",
    "too_large", "full", "stopping", "upstream", "engine",
]  # fmt: skip
"""Why a call was refused; each has one HTTP status (STATUS), and a name in each dialect's error format.

too_long: the prompt does not fit the model's context (context_length_exceeded), so that agents shorten it. too_large:
the body has too many bytes."""
STATUS: Mapping[RefusalReason, int] = {
    "invalid": 400,
    "too_long": 400,
    "not_recordable": 400,
    "wrong_key": 401,
    "unknown_model": 404,
    "not_found": 404,
    "sealed": 409,
    "elsewhere": 421,
    "too_large": 413,
    "full": 429,
    "stopping": 503,
    "upstream": 502,
    "engine": 500,
}


class RefusedCallError(LudicError, ValueError):
    """A call is refused; the sentence is the message of the response."""

    reason: RefusalReason = "invalid"
    field: str | None = None
    """Field of the body that is wrong."""
    retry_after_s: float | None = None
    """Seconds after which the client should try again, if it should."""
    owner: str | None = None
    """Address of the gateway that has the episode, with the reason `elsewhere`."""


def refused(
    reason: RefusalReason,
    sentence: str,
    *,
    field: str | None = None,
    retry_after_s: float | None = None,
    owner: str | None = None,
) -> RefusedCallError:
    """Return the error for a refused call."""
    error = RefusedCallError(sentence)
    error.reason, error.field, error.retry_after_s, error.owner = reason, field, retry_after_s, owner
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """A model call that a client asks for, in any dialect."""

    dialect: Dialect
    model: str | None = None
    """Name that the client asked for."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, with system messages first; empty for `completions`. With previous_id: the new ones."""
    prompt: str | np.ndarray | None = None
    """Prompt of `completions`: a text, or (prompt_length,) int32 token ids."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas in OpenAI's form of chat completions. A custom tool is a function with one text `input`."""
    tool_kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name of the tool as the model sees it: how the dialect answers its calls, such as {"type": "custom"}, or a
    namespace; only the dialect reads it."""
    max_tokens: int | None = None
    """Maximum sampled tokens; None is the run's."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, which leaves them out."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Sampling settings as the client named them, such as temperature; recorded, not used."""
    stream: bool = False
    include_usage: bool = False
    """Send usage in a stream of `chat`."""
    previous_id: str | None = None
    """call_id of the earlier call that `previous_response_id` names; its messages and answer come before `messages`."""
    treated: tuple[str, ...] = ()
    """Fields that --lenient treats as auto, tools that it leaves out, and `model` if it was unknown."""
    asks_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What identifies a call beside its body."""

    request_digest: str
    """SHA-256 of method, path below the episode and body, hexadecimal."""
    idempotency_key: str | None = None
    """SHA-256 of the header Idempotency-Key, hexadecimal."""
    retry_count: int | None = None
    """Value of x-stainless-retry-count; None if the client does not count its retries."""
    declared_parent: str | None = None
    """Value of a header that names a parent; a hint, never used for routing."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """Session headers; hints, never used for routing."""
    user_agent: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery:
    """Whether the answer of a call reaches the client of one request."""

    state: Literal["waiting", "sent", "lost"] = "waiting"
    """sent: the whole answer went to the client. lost: the client got none, or a part."""
    is_gone: Callable[[], Awaitable[bool]] | None = None
    """Returns whether a waiting client has hung up; None if a client that goes cancels its call."""

    def end(self, state: Literal["sent", "lost"]) -> None:
        """Record the end, and forget the client."""
        self.state, self.is_gone = state, None

    async def is_lost(self) -> bool:
        """Return whether the client will never get the answer."""
        if self.state == "waiting" and self.is_gone is not None:
            return await self.is_gone() and self.state != "sent"
        return self.state == "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a stored call, from which a dialect makes the response or the stream."""

    call_id: str
    created_at: datetime
    model: str
    message: Message
    """Role assistant: content without calls and thinking, reasoning, and tool calls with ids that are unique in the
    episode."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_sequence: str | None
    """The client's stop that ended the answer."""
    text: str
    """Text of all delivered tokens, without special tokens; the answer of `completions`."""
    prompt_length: int
    completion_length: int
    """Tokens; 0 if the upstream server does not say."""
    cached_length: int = 0
    """Prompt tokens that were those of an earlier call."""
    token_texts: tuple[str, ...] | None = None
    """(completion_length,) text of each delivered token; None unless the call asks for logprobs, and they are
    captured."""
    token_logprobs: np.ndarray | None = None
    """(completion_length,) float32, nats; None as for token_texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCall:
    """What a backend sampled, before it is stored."""

    message: Message
    """As in `Answer`; ids of tool calls are unique in one call, the gateway makes them unique in the episode."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_sequence: str | None = None
    text: str = ""
    completion: Completion | None = None
    """Tokens that were delivered, with their arrays; None at capture `text`."""
    undelivered: np.ndarray | None = None
    """(n,) int32, tokens that were sampled behind the client's stop; in no row, and counted by the audit."""
    capture: Capture = "sampler"
    token_texts: tuple[str, ...] | None = None
    """As in `Answer`; only for a call that asks for logprobs."""
    usage: tuple[int, int] | None = None
    """Prompt and completion tokens as an upstream server counted them; None counts the tokens."""
    prompt: "Prompt | None" = None
    """The prompt as the backend learned it with the answer, such as an upstream server's token ids; it takes the place
    of that of `prepare`. None: that one holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of a call, and how it follows from an earlier one."""

    tokens: np.ndarray | None
    """(prompt_length,) int32; None at capture `text`."""
    extends: str | None = None
    """call_id whose prompt and completion are the beginning of the tokens."""
    messages_extend: str | None = None
    """call_id whose messages and answer are the beginning of the messages."""
    num_known_messages: int = 0
    """Messages that these are, with the answer; the others are new."""
    made: Literal["whole", "extended", "given"] = "whole"
    """whole: rendered by the chat template; extended: stored ids and a rendered suffix; given: the client's ids or
    text."""
    shown: object = field(default=None, repr=False, compare=False)
    """What the backend keeps of the prompt for calls that extend it; the gateway hands it on to `StoredCall.shown`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class StoredCall:
    """A call that is stored, as the gateway knows it: what later calls of its episode may extend.

    Compared by identity, so that backends can keep facts about it as long as it lives.
    """

    call_id: str
    messages: tuple[Message, ...]
    """Messages of the request, the whole conversation."""
    answer: Message
    tools_digest: str | None
    prompt_tokens: np.ndarray | None
    """(prompt_length,) int32; None at capture `text`."""
    completion: Completion | None
    shown: object = field(default=None, repr=False)
    """`Prompt.shown` of the call; None for a call of an earlier life of the gateway."""

    @property
    def tokens(self) -> np.ndarray | None:
        """(prompt_length + completion_length,) int32; None at capture `text`."""
        if self.prompt_tokens is None or self.completion is None:
            return None
        return np.concatenate([self.prompt_tokens, self.completion.tokens])


class Backend(Protocol):
    """Samples the answers of calls: an engine with a tokenizer, or another server."""

    model: str
    """Name of the model that it serves; stored, and listed by /v1/models."""
    engine: str
    """Name and version of the engine, stored with each call."""

    async def prepare(self, request: CallRequest, earlier: Sequence[StoredCall]) -> Prompt:
        """Return the prompt of a call. earlier: the stored calls of its episode, in order.

        Raises RefusedCallError if the chat template refuses the messages, or if the prompt is too long.
        """
        ...

    async def sample(self, request: CallRequest, prompt: Prompt, params: SamplingParams, seed: int) -> SampledCall:
        """Sample the answer. params: of the run, shortened by the client. Raises RefusedCallError, EngineError."""
        ...

    def token_texts(self, completion: Completion) -> tuple[str, ...] | None:
        """Return the text of each token of a completion; None if the backend has no tokenizer."""
        ...

    async def count(self, request: CallRequest) -> int:
        """Return the number of prompt tokens of a call that extends no other. Raises RefusedCallError, also if only the
        answer of an upstream server tells them."""
        ...
