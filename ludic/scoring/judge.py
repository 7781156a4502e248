"""LLM judge: one request to an OpenAI-compatible server for each rollout, and a number out of its answer.

Requests are tried again while the server can't be reached, is overloaded, fails, or breaks its answer off. Everything
else that is wrong with an answer is a failure of that rollout. The API key is read from an environment variable;
`ludic.masking` keeps it out of logs, files and errors. Raises ConfigError for options that can't work.
"""

import json
import os
import re
import time
from hashlib import sha256
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx2 as httpx
import msgspec
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_before_delay, wait_random_exponential

from ludic.errors import ConfigError
from ludic.masking import keep_secret, mask, public_url
from ludic.records import Rollout
from ludic.scoring.options import ScoreOptions
from ludic.scoring.outcome import CostedScore, Outcome, failed, to_outcome
from ludic.scoring.prompts import fill, read_template
from ludic.user_code import describe

_OVERLOADED = {408, 425, 429}
_MOST_BYTES = 8 << 20
"""Largest answer that is read."""
_SHOWN = 200
_KEY = re.compile(r"[\x21-\x7e]+")
_LONGEST_PAUSE_S = 20.0
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
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


class _TryAgainError(Exception):
    """The server did not answer, or not whole; another request may succeed."""


class _RefusedError(Exception):
    """The server refused the request, or its answer is of no use; another request would not help."""


class Judge:
    """A model behind an OpenAI-compatible server, as a Scorer."""

    name = "judge"

    def __init__(self, options: ScoreOptions) -> None:
        assert options.judge_url is not None
        assert options.judge_model is not None
        assert options.judge_prompt is not None
        self._options = options
        self._url = f"{_check_url(options.judge_url)}/chat/completions"
        self.model: str | None = options.judge_model
        self.prompt: str | None = read_template(options.judge_prompt)
        self._template = self.prompt
        self._pattern = _compile(options.judge_pattern)
        about = [self.model, self.prompt, options.judge_pattern, dict(options.judge_options)]
        self.version = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        key = _read_key(options.judge_key_env)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=options.concurrency),
        )

    def score(self, rollout: Rollout, timeout_s: float) -> Outcome:
        try:
            return self._read(self._ask(fill(self._template, rollout), time.monotonic() + timeout_s))
        except (_TryAgainError, _RefusedError, ValueError) as error:
            return failed(str(error))
        except Exception as error:
            return failed(describe(error))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, prompt: str, until: float) -> _Answer:
        """Return the server's answer. until: time of the monotonic clock after which no request begins."""
        options = self._options
        body = {**options.judge_options, "model": self.model, "messages": [{"role": "user", "content": prompt}]}
        retrying = Retrying(
            retry=retry_if_exception_type(_TryAgainError),
            wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE_S),
            stop=stop_after_attempt(options.judge_tries) | stop_before_delay(max(0.0, until - time.monotonic())),
            reraise=True,
        )
        return retrying(self._request, body, until)

    def _request(self, body: dict[str, Any], until: float) -> _Answer:
        """Send one request. Raises _TryAgainError, _RefusedError."""
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise _TryAgainError(f"no answer within {self._options.scorer_timeout_s:g} s")
        try:
            with self._client.stream("POST", self._url, json=body, timeout=left_s) as response:
                data = _read_all(response, until)
        except httpx.TimeoutException:
            raise _TryAgainError(f"no answer within {self._options.scorer_timeout_s:g} s") from None
        except httpx.RequestError as error:
            raise _TryAgainError(describe(error)) from error
        if not response.is_success:
            kind = _TryAgainError if response.status_code in _OVERLOADED or response.is_server_error else _RefusedError
            raise kind(f"the judge's server answered {response.status_code}: {_shown(_text(data))}")
        try:
            return msgspec.json.decode(data, type=_Answer)
        except msgspec.ValidationError as error:
            raise _RefusedError(f"the judge's server answered no chat completion: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # half of an answer
            raise _TryAgainError(f"the judge's server answered broken JSON: {_shown(_text(data))}") from error

    def _read(self, answer: _Answer) -> Outcome:
        """Return the number in an answer, or why there is none; either way with the cost."""
        costs = self._costs(answer.usage or _Usage())
        text = answer.choices[0].message.content if answer.choices else None
        if text is None:
            return failed("the judge's answer has no text", **costs)
        if answer.choices[0].finish_reason == "length":
            return failed(f"the judge's answer was cut at its maximum length: {mask(text)[-_SHOWN:]!r}", **costs)
        value = _parse(text, self._pattern)
        if value is None:
            wanted = "a JSON number" if self._pattern is None else f"a number that {self._pattern.pattern!r} matches"
            return failed(f"the judge answered {_shown(text)}, wanted {wanted}", **costs)
        return to_outcome(CostedScore(value=value, **costs))

    def _costs(self, usage: _Usage) -> dict[str, Any]:
        num_input, num_output = usage.prompt_tokens, usage.completion_tokens
        input_price, output_price = self._options.judge_input_price, self._options.judge_output_price
        cost = None
        if num_input is not None and num_output is not None and input_price is not None and output_price is not None:
            cost = (num_input * input_price + num_output * output_price) / 1e6
        return {"num_input_tokens": num_input, "num_output_tokens": num_output, "cost": cost}


def _check_url(url: str) -> str:
    """Return the URL without a trailing slash. Raises ConfigError for one that is not http, or that holds a secret."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(
            f"judge_url, {public_url(url)}, is no URL; wanted such as http://localhost:8000/v1"
        ) from error
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("judge_url holds a user, a password or a query; name the key's variable in judge_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"judge_url is {public_url(url)!r}, wanted such as http://localhost:8000/v1")
    return url.rstrip("/")


def _compile(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"judge_pattern {pattern!r} is no regular expression: {error}") from error


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not _KEY.fullmatch(key):
        found = "holds spaces or other characters that no key has" if key else "is not set"
        raise ConfigError(f"the environment variable {variable}, which judge_key_env names, {found}")
    return keep_secret(key)


def _read_all(response: httpx.Response, until: float) -> bytes:
    data = bytearray()
    for piece in response.iter_bytes():
        data += piece
        if len(data) > _MOST_BYTES:
            raise _RefusedError(f"the judge's server answered more than {_MOST_BYTES:,} bytes")
        if time.monotonic() > until:
            raise _TryAgainError("the judge's answer did not end in time")
    return bytes(data)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


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
        return float(text) if _NUMBER.fullmatch(text.strip()) else None
    except ValueError:  # msgspec's errors are ValueErrors
        return None
