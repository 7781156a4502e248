"""A judge: a model behind an OpenAI-compatible server, which environments (Judge) and `ludic score` (JudgeScorer) ask.

Requests are tried again while the server can't be reached, is overloaded, fails, or breaks its answer off. At most
`max_in_flight` are on their way at a time, in one process; the others wait for their turn. Raises JudgeError for what
is wrong with an answer, ConfigError for settings that can't work. The API key is read from an environment variable;
`ludic.base.masking` keeps it out of logs, files and errors.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx2 as httpx
import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from ludic.base import AnswerTooLongError, ask, finite_float, keep_secret, local_path, mask, public_url
from ludic.errors import ConfigError, JudgeError
from ludic.eval import CostedScore, Outcome, ScoreOptions, failed, to_outcome
from ludic.records import Message, Rollout
from ludic.settings import RequestLimit, SideLoop
from ludic.settings.user_code import describe

T = TypeVar("T")

_OVERLOADED = {408, 425, 429}
_SHOWN = 200
_KEY = re.compile(r"[\x21-\x7e]+")
_LONGEST_PAUSE_S = 20.0
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
"""Matches a decimal number; float() also takes 1_0, the digits of other scripts, nan and inf."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _TryAgainError(JudgeError):
    """The server did not answer, or not whole; another request may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """Answer of a judge."""

    text: str | None
    finish_reason: str | None
    num_input_tokens: int | None
    """Tokens that the judge read; None if its server does not say."""
    num_output_tokens: int | None
    """Tokens that the judge wrote."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """Connections to one server in one event loop."""

    client: httpx.AsyncClient
    turns: RequestLimit


_connections: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Connection]]" = WeakKeyDictionary()
"""By event loop and URL, so that all judges of a process that share a server share its limit of requests."""


class Judge:
    """A model behind an OpenAI-compatible server. May be made anywhere; all coroutines of one event loop may use it."""

    def __init__(
        self,
        url: str,
        model: str | None,
        *,
        pattern: str | None = None,
        options: Mapping[str, Any] | None = None,
        tries: int = 5,
        timeout_s: float = 60.0,
        key_env: str | None = None,
        max_in_flight: int = 16,
    ) -> None:
        """Check the settings; no request is sent.

        url: base URL, such as http://localhost:8000/v1. model: name on the server; None names none. pattern: regular
        expression whose last match in an answer, or its first group, is the number; None wants a JSON number. options:
        further fields of a request; None is a temperature of 0. tries: most requests for one answer, if the server
        fails. timeout_s: most seconds of one answer, all tries together, without the wait for its turn. key_env:
        environment variable with the API key. max_in_flight: most requests at a time of all judges of this process with
        this URL. Raises ConfigError.
        """
        if max_in_flight < 1 or tries < 1 or not timeout_s > 0:
            raise ConfigError(
                f"max_in_flight is {max_in_flight!r}, tries {tries!r}, timeout_s {timeout_s!r}; wanted 1 or more each"
            )
        self.url, self.model = check_url(url, "url"), model
        self.max_in_flight = max_in_flight
        self._pattern = compile_pattern(pattern, "pattern")
        self._options = {"temperature": 0} if options is None else dict(options)
        self._tries, self._timeout_s = tries, timeout_s
        key = read_key(key_env, "key_env")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def score(self, prompt: str) -> float:
        """Return the number that the judge answers to a prompt. Raises JudgeError."""
        return self.number_in(await self.ask(prompt))

    async def ask(self, prompt: str) -> JudgeReply:
        """Return the judge's answer to a user's message. Raises JudgeError."""
        answer = await self._post(
            "/chat/completions", {"messages": [{"role": "user", "content": prompt}]}, _Answer, "no chat completion"
        )
        usage, choice = answer.usage or _Usage(), answer.choices[0] if answer.choices else None
        return JudgeReply(
            text=choice.message.content if choice else None,
            finish_reason=choice.finish_reason if choice else None,
            num_input_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
        )

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON that the server answers to a request of any kind, such as "/classify" of a reward model.

        body: fields beside `model` and the judge's options. Raises JudgeError.
        """
        return await self._post(path, body, Any, "no JSON")

    def number_in(self, reply: JudgeReply) -> float:
        """Return the number in an answer. Raises JudgeError if there is none."""
        if reply.text is None:
            raise JudgeError("the judge's answer has no text")
        if reply.finish_reason == "length":
            raise JudgeError(f"the judge's answer was cut at its maximum length: {mask(reply.text)[-_SHOWN:]!r}")
        value = _parse(reply.text, self._pattern)
        if value is None:
            wanted = "a JSON number" if self._pattern is None else f"a number that {self._pattern.pattern!r} matches"
            raise JudgeError(f"the judge answered {_shown(reply.text)}, wanted {wanted}")
        return value

    async def _post(self, path: str, body: Mapping[str, Any], wanted: Any, otherwise: str) -> Any:
        """Send a request until it is answered. wanted: type of the answer. otherwise: what it is then called."""
        named = {} if self.model is None else {"model": self.model}
        connection, body = self._connection(), {**self._options, **body, **named}
        until = time.monotonic() + self._timeout_s

        async def request() -> bytes:
            nonlocal until
            asked = time.monotonic()
            async with connection.turns.turn():
                until += time.monotonic() - asked
                return await self._request(connection.client, path, body, until)

        def is_over(state: RetryCallState) -> bool:
            return state.attempt_number >= self._tries or time.monotonic() + state.upcoming_sleep >= until

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TryAgainError),
            wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE_S),
            stop=is_over,
            reraise=True,
        )
        data: bytes = await retrying(request)
        try:
            return msgspec.json.decode(data, type=wanted)
        except msgspec.ValidationError as error:
            raise JudgeError(f"the server answered {otherwise}: {error}") from error

    async def _request(self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any], until: float) -> bytes:
        """Send one request and return its JSON. until: time of the monotonic clock. Raises JudgeError."""
        late = f"no answer within {self._timeout_s:g} s"
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise _TryAgainError(late)
        try:
            answer = await ask(client, "POST", f"{self.url}{path}", json=body, timeout_s=left_s, headers=self._headers)
        except httpx.TimeoutException:
            raise _TryAgainError(late) from None
        except httpx.RequestError as error:
            raise _TryAgainError(describe(error)) from error
        except AnswerTooLongError as error:
            raise JudgeError(str(error)) from error
        if not answer.is_success:
            kind = _TryAgainError if answer.status in _OVERLOADED or answer.status >= 500 else JudgeError
            raise kind(f"the server answered {answer.status}: {_shown(answer.text)}")
        try:
            msgspec.json.decode(answer.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # half of an answer
            raise _TryAgainError(f"the server answered broken JSON: {_shown(answer.text)}") from error
        return answer.data

    def _connection(self) -> _Connection:
        """Return the connections of this event loop, which end with it."""
        of_loop = _connections.setdefault(asyncio.get_running_loop(), {})
        if self.url not in of_loop:
            client = httpx.AsyncClient(limits=httpx.Limits(max_connections=self.max_in_flight))
            of_loop[self.url] = _Connection(client, RequestLimit(self.max_in_flight))
            task = asyncio.create_task(_close_at_the_end(client))
            _closing.add(task)
            task.add_done_callback(_closing.discard)
        found = of_loop[self.url]
        if found.turns.most != self.max_in_flight:
            raise ConfigError(
                f"max_in_flight is {self.max_in_flight} for a judge at {self.url}, and {found.turns.most} for another "
                "one of this process; they share the limit, so give both the same"
            )
        return found


_closing: set[asyncio.Task[None]] = set()


async def _close_at_the_end(client: httpx.AsyncClient) -> None:
    """Close connections when the event loop ends, which cancels its tasks."""
    with suppress(asyncio.CancelledError):
        await asyncio.get_running_loop().create_future()
    _connections.pop(asyncio.get_running_loop(), None)
    await client.aclose()


def check_url(url: str, setting: str) -> str:
    """Return the URL without a trailing slash. Raises ConfigError for one that is not http, or that holds a secret."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(
            f"{setting}, {public_url(url)}, is no URL; wanted such as http://localhost:8000/v1"
        ) from error
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{setting} holds a user, a password or a query; name the variable of a key instead")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{setting} is {public_url(url)!r}, wanted such as http://localhost:8000/v1")
    return url.rstrip("/")


def compile_pattern(pattern: str | None, setting: str) -> re.Pattern[str] | None:
    """Return a compiled pattern. Raises ConfigError."""
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{setting} {pattern!r} is no regular expression: {error}") from error


def read_key(variable: str | None, setting: str) -> str | None:
    """Return the key in an environment variable, which is masked from now on. Raises ConfigError if there is none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not _KEY.fullmatch(key):
        found = "holds spaces or other characters that no key has" if key else "is not set"
        raise ConfigError(f"the environment variable {variable}, which {setting} names, {found}")
    return keep_secret(key)


def _shown(text: str) -> str:
    """Return the begin of an answer for an error; without the key, which an answer may repeat."""
    return repr(mask(text)[:_SHOWN])


def _parse(text: str, pattern: re.Pattern[str] | None) -> float | None:
    """Return the number in an answer, None if there is none."""
    if pattern is not None:
        matches = list(pattern.finditer(text))
        if not matches:
            return None
        text = matches[-1][1 if pattern.groups else 0] or ""
    try:
        if pattern is None:
            return msgspec.json.decode(text.strip(), type=float)
        return finite_float(text) if _NUMBER.fullmatch(text.strip()) else None
    except ValueError:  # msgspec's errors are ValueErrors
        return None


# --- A judge of stored rollouts --------------------------------------------------------------------------


class JudgeScorer:
    """A model behind an OpenAI-compatible server, as a Scorer: one request for each rollout, a number in its answer.

    Everything that is wrong with an answer is a failure of that rollout.
    """

    name = "judge"

    def __init__(self, options: ScoreOptions) -> None:
        assert options.judge_url is not None
        assert options.judge_model is not None
        assert options.judge_prompt is not None
        self._options = options
        check_url(options.judge_url, "judge_url")
        compile_pattern(options.judge_pattern, "judge_pattern")
        self.model: str | None = options.judge_model
        self.prompt: str | None = read_template(options.judge_prompt)
        self._template = self.prompt
        about = [self.model, self.prompt, options.judge_pattern, dict(options.judge_options)]
        self.version = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        read_key(options.judge_key_env, "judge_key_env")
        self._judge = Judge(
            options.judge_url,
            options.judge_model,
            pattern=options.judge_pattern,
            options=options.judge_options,
            tries=options.judge_tries,
            timeout_s=options.scorer_timeout_s,
            key_env=options.judge_key_env,
            max_in_flight=options.concurrency,
        )
        self._loop = SideLoop()

    def score(self, rollout: Rollout, timeout_s: float) -> Outcome:
        """Score a rollout. The judge has the limit of time itself, with a better reason than a timeout."""
        try:
            reply = self._loop.run(self._judge.ask(fill(self._template, rollout)))
        except (JudgeError, ValueError) as error:
            return failed(str(error))
        except Exception as error:
            return failed(describe(error))
        costs = self._costs(reply)
        try:
            return to_outcome(CostedScore(value=self._judge.number_in(reply), **costs))
        except JudgeError as error:
            return failed(str(error), **costs)

    def close(self) -> None:
        """Close the connections."""
        self._loop.close()

    def _costs(self, reply: JudgeReply) -> dict[str, Any]:
        num_input, num_output = reply.num_input_tokens, reply.num_output_tokens
        input_price, output_price = self._options.judge_input_price, self._options.judge_output_price
        cost = None
        if num_input is not None and num_output is not None and input_price is not None and output_price is not None:
            cost = (num_input * input_price + num_output * output_price) / 1e6
        return {"num_input_tokens": num_input, "num_output_tokens": num_output, "cost": cost}


# --- Prompts ---------------------------------------------------------------------------------------------


_FIELDS = re.compile(r"\{(prompt|response|messages)\}")
_MOST_BYTES_OF_TEMPLATE = 1_000_000


def read_template(path: str) -> str:
    """Return the template in a file. Raises ConfigError if it can't be read or has nothing to replace."""
    file = local_path(path, "judge_prompt")
    try:
        if file.stat().st_size > _MOST_BYTES_OF_TEMPLATE:
            raise ConfigError(
                f"judge_prompt {file} has more than {_MOST_BYTES_OF_TEMPLATE:,} bytes; wanted the text of a prompt"
            )
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge_prompt {file} can't be read: {error}") from error
    if not _FIELDS.search(template):
        raise ConfigError(f"judge_prompt {file} has none of {{prompt}}, {{response}} and {{messages}}; add one of them")
    return template


def fill(template: str, rollout: Rollout) -> str:
    """Return the template with the rollout's texts.

    prompt: the messages before the model's first one. response: the model's message, or all messages from its first
    one on. messages: all. Several messages have their roles in front. Raises ValueError for a rollout without messages.
    """
    messages = rollout.messages
    if not messages:
        raise ValueError("the rollout has no messages, which the judge's prompt needs")
    first = next((index for index, each in enumerate(messages) if each.role == "assistant"), len(messages))
    texts = {
        "prompt": _as_text(messages[:first]),
        "response": _as_text(messages[first:]),
        "messages": _with_roles(messages),
    }
    return _FIELDS.sub(lambda match: texts[match[1]], template)


def _as_text(messages: Sequence[Message]) -> str:
    return messages[0].content if len(messages) == 1 and not messages[0].tool_calls else _with_roles(messages)


def _with_roles(messages: Sequence[Message]) -> str:
    return "\n\n".join("\n".join([f"{each.role}: {each.content}", *_tool_lines(each)]) for each in messages)


def _tool_lines(message: Message) -> list[str]:
    return [f"tool call {call.name}: {call.arguments}" for call in message.tool_calls]
