"""Sample the answers of calls from another server that speaks OpenAI's chat completions, whatever the client spoke.

Asks for token ids and logprobs, which vLLM gives: then calls are captured for training (`sampler`), else as token ids
(`ids`) or texts (`text`). What a server does not take is left out of later requests, and logged once. The server's key
is read from an environment variable, and is in no file and no log. Needs no torch.

Raises RefusedCallError: with the server's own status for 429 and 503, so that clients wait as long as it says;
`invalid` for what the server refuses; `upstream` for a server that fails or answers what can't be used.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx2
import msgspec
import numpy as np

from ludic.base import AnswerTooLongError, HttpAnswer, ask, keep_secret, mask, public_url
from ludic.engines import Completion, SamplingParams
from ludic.errors import ConfigError, one_line
from ludic.gateway.calls import CallRequest, Prompt, RefusedCallError, SampledCall, StoredCall, refused
from ludic.gateway.config import KEY_VARIABLE, UpstreamSettings
from ludic.gateway.matching import longest_known
from ludic.records import NUM_TOKEN_IDS, Capture, FinishReason, Message, ToolCall, WeightSpan

logger = logging.getLogger(__name__)

NO_LIMIT = 1_000_000
"""max_tokens of a run that sets no limit of its own: the server's holds."""
_MOST_BYTES = 256 << 20
_CONNECT_S = 10.0
_MOST_CHARACTERS = 500
_WHOLE = {"logprobs": True, "return_token_ids": True}
"""What is asked for beyond a plain answer."""
_KEY_STATUSES = (401, 403)
_NO_LOGPROB = -9_999.0
"""What vLLM writes for minus infinity."""
_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "stop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt(Prompt):
    """The prompt of a call, whose tokens the server tells with its answer."""

    earlier: Sequence[StoredCall] = ()


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _LogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Choice(msgspec.Struct):
    message: _Said
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    token_ids: list[int] | None = None
    stop_reason: str | int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = field(default_factory=list)


class UpstreamBackend:
    """A server of OpenAI's chat completions. Belongs to one event loop; as a context manager it closes its connections.

    model: name of the model there.
    """

    def __init__(self, url: str, model: str, settings: UpstreamSettings) -> None:
        """url: such as https://api.openai.com/v1, of `check_upstream`."""
        self.model, self.engine = model, f"upstream {public_url(url)}"
        self._url, self._timeout_s = url, settings.upstream_timeout_s
        self._client = make_client(settings)
        self._whole = dict(_WHOLE)
        """What the server takes of `_WHOLE`, as far as it is known."""
        self._limit_name = "max_tokens"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def prepare(self, request: CallRequest, earlier: Sequence[StoredCall]) -> Prompt:
        """Return the prompt of a call without tokens, which the server tells with its answer. Raises RefusedCallError
        for `completions`, whose prompts have no messages."""
        if request.dialect == "completions":
            raise refused("not_recordable", "an upstream server is sent chats alone; use chat/completions")
        known = longest_known(request.messages, earlier)
        extends = None if known is None else known[0].call_id
        num_known = 0 if known is None else known[1]
        return _Prompt(tokens=None, messages_extend=extends, num_known_messages=num_known, earlier=earlier)

    async def sample(self, request: CallRequest, prompt: Prompt, params: SamplingParams, seed: int) -> SampledCall:
        """Send the conversation to the server, and return its answer. Raises RefusedCallError."""
        body = self._body(request, params, seed)
        while True:
            whole, limit_name = dict(self._whole), self._limit_name
            limit = {} if params.max_tokens >= NO_LIMIT else {limit_name: params.max_tokens}
            answer = await self._ask({**body, **limit, **whole})
            if answer.status not in (400, 422) or not self._learn(answer, whole, limit_name):
                break
        if not answer.is_success:
            raise _refusal(answer)
        return _sampled(answer, prompt, params)

    def token_texts(self, completion: Completion) -> None:
        """Return None: only the server has the tokenizer."""

    async def count(self, request: CallRequest) -> int:
        """Raise RefusedCallError: the server counts the tokens of a prompt with its answer alone."""
        raise refused("not_found", "an upstream server tells the number of prompt tokens with its answer alone")

    def _body(self, request: CallRequest, params: SamplingParams, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [to_openai(message) for message in request.messages],
            "temperature": params.temperature,
            "seed": seed,
        }
        if params.top_p < 1:
            body["top_p"] = params.top_p
        if params.top_k is not None:
            body["top_k"] = params.top_k
        if request.stop:
            body["stop"] = list(request.stop)
        if request.tools:
            body["tools"] = [dict(tool) for tool in request.tools]
        return body

    async def _ask(self, body: Mapping[str, Any]) -> HttpAnswer:
        limits = {"timeout_s": self._timeout_s, "connect_s": _CONNECT_S, "most_bytes": _MOST_BYTES}
        try:
            return await ask(self._client, "POST", f"{self._url}/chat/completions", json=body, **limits)  # type: ignore[arg-type]
        except httpx2.TimeoutException as error:
            raise refused("upstream", f"{self.engine} did not answer in {self._timeout_s:g} s") from error
        except (httpx2.TransportError, AnswerTooLongError) as error:
            why = mask(f"{type(error).__name__} {one_line(error)}")
            raise refused("upstream", f"{self.engine} gave no answer ({why})", retry_after_s=1.0) from error

    def _learn(self, answer: HttpAnswer, whole: Mapping[str, Any], limit_name: str) -> bool:
        """Leave out from now on what the server refused by name; returns whether there was any."""
        text = answer.text
        if limit_name == "max_tokens" and "max_completion_tokens" in text:
            self._limit_name = "max_completion_tokens"
            return True
        named = [name for name in whole if name in text]
        if named:
            logger.warning("%s does not take %s; calls are stored without", self.engine, " and ".join(named))
        for name in named:
            self._whole.pop(name, None)
        return bool(named)


def make_client(settings: UpstreamSettings) -> httpx2.AsyncClient:
    """Return a client that sends the key of the environment."""
    key = os.environ.get(settings.upstream_key)
    headers = {} if not key else {"Authorization": f"Bearer {keep_secret(key)}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx2.AsyncClient(headers=headers, limits=limits, trust_env=False)


def check_upstream(url: str) -> str:
    """Return the URL of a server without a slash at its end. Raises ConfigError."""
    try:
        parsed = httpx2.URL(url)
        is_usable = parsed.scheme in ("http", "https") and bool(parsed.host)
        is_usable = is_usable and not (parsed.query or parsed.fragment or parsed.userinfo)
    except httpx2.InvalidURL:
        is_usable = False
    if not is_usable:
        raise ConfigError(
            f"upstream is {public_url(url)}, wanted the base URL of a server, such as http://127.0.0.1:8000/v1, "
            f"without a key; the key is in the variable {KEY_VARIABLE}"
        )
    url = url.rstrip("/")
    return url if parsed.path.strip("/") else f"{url}/v1"


async def find_model(url: str, settings: UpstreamSettings) -> str:
    """Return the name of the only model that a server lists. Raises ConfigError."""
    async with make_client(settings) as client:
        try:
            answer = await ask(client, "GET", f"{url}/models", timeout_s=30.0, connect_s=_CONNECT_S)
        except (httpx2.TransportError, AnswerTooLongError) as error:
            why = mask(f"{type(error).__name__} {one_line(error)}")
            raise ConfigError(
                f"{public_url(url)} does not answer ({why}); start the server, or correct --upstream"
            ) from error
    if not answer.is_success:
        advice = "give --model NAME, or correct --upstream"
        if answer.status in _KEY_STATUSES:
            has_key = bool(os.environ.get(settings.upstream_key))
            state = "is not the server's" if has_key else "is not set"
            advice = f"the variable {settings.upstream_key} has the server's key, and {state}"
        raise ConfigError(f"{public_url(url)}/models answered {answer.status}: {_message(answer)}; {advice}")
    try:
        names = [model.id for model in msgspec.json.decode(answer.data, type=_Models).data]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{public_url(url)}/models answered no list of models; give --model NAME, or correct --upstream"
        ) from error
    if len(names) != 1:
        listed = ", ".join(names[:10]) or "none"
        raise ConfigError(f"{public_url(url)} serves {len(names)} models ({listed}); give --model NAME")
    return names[0]


def to_openai(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form of chat completions."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        found["name"] = message.name
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found


# --- Answers ------------------------------------------------------------------------------------------------------


def _sampled(answer: HttpAnswer, prompt: Prompt, params: SamplingParams) -> SampledCall:
    try:
        found = msgspec.json.decode(answer.data, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refused("upstream", f"the upstream server's answer can't be used: {one_line(error)}") from error
    if len(found.choices) != 1:
        raise refused("upstream", f"the upstream server answered with {len(found.choices)} choices, wanted 1")
    choice = found.choices[0]
    finish_reason = _FINISH.get(choice.finish_reason or "")
    if finish_reason is None:
        wanted = " or ".join(_FINISH)
        raise refused("upstream", f"the upstream server ended its answer with {choice.finish_reason!r}, not {wanted}")
    said = choice.message
    calls = tuple(
        ToolCall(id=call.id or f"call_{number}", name=call.function.name, arguments=call.function.arguments)
        for number, call in enumerate(said.tool_calls or ())
    )
    message = Message(
        role="assistant",
        content=said.content or "",
        reasoning=said.reasoning_content if said.reasoning_content is not None else said.reasoning,
        tool_calls=calls,
    )
    completion, capture = _completion(found, finish_reason, params)
    return SampledCall(
        message=message,
        finish_reason="tool_calls" if calls and finish_reason == "stop" else finish_reason,
        stop_sequence=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        text=said.content or "",
        completion=completion,
        capture=capture,
        usage=None if found.usage is None else (found.usage.prompt_tokens, found.usage.completion_tokens),
        prompt=None if completion is None else _known_prompt(found.prompt_token_ids, prompt),
    )


def _completion(
    found: _Answer, finish_reason: FinishReason, params: SamplingParams
) -> tuple[Completion | None, Capture]:
    """Return the tokens of an answer as far as the server tells them, and what they are worth."""
    choice = found.choices[0]
    if not choice.token_ids or not found.prompt_token_ids:
        return None, "text"
    for name, ids in (("token_ids", choice.token_ids), ("prompt_token_ids", found.prompt_token_ids)):
        if min(ids) < 0 or max(ids) >= NUM_TOKEN_IDS:
            raise refused("upstream", f"the upstream server's {name} run from {min(ids)} to {max(ids)}")
    logprobs = [each.logprob for each in (choice.logprobs and choice.logprobs.content) or ()]
    is_whole = len(logprobs) == len(choice.token_ids)
    # Servers tell logprobs of the model's own distribution, which is the one sampled from only without these.
    is_sampled_from = params.temperature == 1 and params.top_p == 1 and params.top_k is None
    values = np.array(logprobs if is_whole else [0.0] * len(choice.token_ids), np.float32)
    is_sound = bool((values <= 0).all() and (values > _NO_LOGPROB).all())
    completion = Completion(
        tokens=np.array(choice.token_ids, np.int32),
        finish_reason=finish_reason,
        weight_versions=(WeightSpan(version=0, start=0, end=len(choice.token_ids)),),
        columns={"response_logprobs": values if is_sound else np.zeros_like(values)},
    )
    return completion, "sampler" if is_whole and is_sampled_from and is_sound else "ids"


def _known_prompt(token_ids: Sequence[int] | None, prompt: Prompt) -> Prompt:
    """Return the prompt with the tokens that the server told, and the earlier call whose tokens they begin with."""
    tokens = np.array(token_ids, np.int32)
    extends: StoredCall | None = None
    longest = 0
    for call in prompt.earlier if isinstance(prompt, _Prompt) else ():
        before = call.tokens
        if before is None or not longest < len(before) <= len(tokens):
            continue
        if np.array_equal(before, tokens[: len(before)]):
            extends, longest = call, len(before)
    return Prompt(
        tokens=tokens,
        extends=None if extends is None else extends.call_id,
        messages_extend=prompt.messages_extend,
        num_known_messages=prompt.num_known_messages,
        made="whole" if extends is None else "extended",
    )


def _refusal(answer: HttpAnswer) -> RefusedCallError:
    """Return the refusal of a call that the upstream server refused."""
    text = f"the upstream server answered {answer.status}: {_message(answer)}"
    if answer.status == 429:
        return refused("full", text, retry_after_s=_retry_after(answer) or 1.0)
    if answer.status == 503:
        return refused("upstream", text, retry_after_s=_retry_after(answer) or 1.0)
    if answer.status in (400, 413, 422):
        return refused("invalid", text)
    return refused("upstream", text, retry_after_s=_retry_after(answer))


def _retry_after(answer: HttpAnswer) -> float | None:
    """Return the seconds of the header Retry-After; None for a date or none."""
    try:
        seconds = float(answer.headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(max(seconds, 0.0), 3_600.0) if math.isfinite(seconds) else None


def _message(answer: HttpAnswer) -> str:
    """Return the text of an error, or its beginning, without secrets. A web page tells nothing in one line."""
    if answer.text.lstrip().startswith("<"):
        return "a web page"
    return " ".join(mask(answer.text).split())[:_MOST_CHARACTERS] or "(no text)"
