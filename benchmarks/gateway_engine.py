"""A fake engine, in process and behind an HTTP server that answers as vLLM does, for benchmarks.gateway.

    python -m benchmarks.gateway_engine --port 8000 --log samples.jsonl

The server has /v1/chat/completions with token ids and logprobs (return_token_ids), streamed and not, and
/inference/v1/generate. With --num-tokens it gives the same completion to each call, without reading the messages: all
time is then that of servers and gateways. Else it renders the messages by a chat template and samples 20 to 60 tokens
at random. All tokens are appended to the log before they leave; of a stream that the client ends, the later ones are
not sampled.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ludic.engines import Completion, GenerationRequest, SamplingParams
from ludic.models import render_prompt
from ludic.models.tiny import train_tokenizer
from ludic.records import Message, ToolCall, WeightSpan
from ludic.settings import run_script

MODEL = "fake"
_CORPUS = ["the answer is in the file and the tests of the program are there ", "user assistant system tool \n\n"] * 50
_CHUNKS = 8
"""Parts of a streamed answer, 20 ms apart."""


def make_tokenizer() -> Any:
    """Byte-level BPE of 400 entries: a sampled text is rarely tokenized to the sampled ids."""
    return train_tokenizer(_CORPUS, vocab_size=400, max_length=1_000_000)


class FakeEngine:
    """Engine of the protocol that samples at random, or gives the same completion to each call."""

    name, repeats_in_any_batch, policy_version, max_length, max_batch = "fake 1", True, 0, 1_000_000, 4_096

    def __init__(
        self, tokenizer: Any, *, num_tokens: int | None = None, latency_s: float = 0.0, log: Path | None = None
    ) -> None:
        """num_tokens: of the completion of each call; None samples 20 to 60. log: JSON lines of the completions."""
        self.tokenizer, self.latency_s, self.log = tokenizer, latency_s, log
        self.num_sampled = 0
        self._words = np.array([token for token in range(256, len(tokenizer)) if _is_plain(tokenizer, token)], np.int32)
        self.fixed = None if num_tokens is None else self._completion(num_tokens, np.random.default_rng(0))

    async def generate(self, request: GenerationRequest) -> Completion:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if self.fixed is not None:
            return self.fixed
        completion = self.sample()
        self.keep(completion, 0, len(completion.tokens))
        return completion

    def sample(self) -> Completion:
        """Return a completion that is not in the log."""
        self.num_sampled += 1
        rng = np.random.default_rng(self.num_sampled)
        return self._completion(int(rng.integers(20, 60)), rng)

    def keep(self, completion: Completion, first: int, last: int) -> None:
        """Append tokens of a completion to the log."""
        if self.log is None:
            return
        tokens, logprobs = completion.tokens[first:last].tolist(), completion.logprobs[first:last].tolist()
        with self.log.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode({"tokens": tokens, "logprobs": logprobs}) + b"\n")

    def load_weights(self, folder: str, version: int) -> None:
        """There are none."""

    def _completion(self, num_tokens: int, rng: np.random.Generator) -> Completion:
        tokens = np.append(rng.choice(self._words, num_tokens - 1), self.tokenizer.eos_token_id).astype(np.int32)
        return Completion(
            tokens=tokens,
            finish_reason="stop",
            weight_versions=(WeightSpan(version=0, start=0, end=num_tokens),),
            # No two of a few thousand are equal, so that a logprob tells which token it belongs to.
            columns={"response_logprobs": -rng.uniform(0.01, 8, num_tokens).astype(np.float32)},
        )


def _is_plain(tokenizer: Any, token: int) -> bool:
    text = tokenizer.decode([token])
    return bool(text.strip()) and text.isascii() and text.isprintable() and "<" not in text


# --- The server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """Answers of the engine over HTTP, as vLLM 0.32 gives them."""

    engine: FakeEngine

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/health", self.models, methods=["GET"]),
        ]
        return Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1_000_000}]})

    async def generate(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        completion = await self.engine.generate(_request(np.array(body["token_ids"], np.int32)))
        if completion is self.engine.fixed:
            return Response(self._fixed_choice, media_type="application/json")
        return _json({"choices": [self._choice(completion)]})

    async def chat(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        if self.engine.fixed is not None and not body.get("stream"):
            await self.engine.generate(_request(np.zeros(1, np.int32)))
            return Response(self._fixed_answer, media_type="application/json")
        prompt = render_prompt(self.engine.tokenizer, [*map(_message, body["messages"])], tools=body.get("tools") or ())
        if body.get("stream"):
            return StreamingResponse(self._events(prompt), media_type="text/event-stream")
        return _json(self._answer(prompt, await self.engine.generate(_request(prompt))))

    async def _events(self, prompt: np.ndarray) -> AsyncIterator[bytes]:
        completion = self.engine.fixed or self.engine.sample()
        borders = np.linspace(0, len(completion.tokens), _CHUNKS + 1, dtype=int)
        base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        for first, last in pairwise(borders):
            delta = {"role": "assistant", "content": self._text(completion.tokens[first:last])}
            choice = {"index": 0, "delta": delta, "finish_reason": "stop" if last == borders[-1] else None}
            choice |= self._tokens(completion, first, last)
            self.engine.keep(completion, first, last)
            event = base | {"choices": [choice]} | ({} if first else {"prompt_token_ids": prompt.tolist()})
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"
            await asyncio.sleep(0.02)
        yield b"data: [DONE]\n\n"

    def _answer(self, prompt: np.ndarray, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._text(completion.tokens)}
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(completion.tokens)}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"message": message, **self._choice(completion)}],
            "prompt_token_ids": prompt.tolist(),
            "usage": counts | {"total_tokens": sum(counts.values())},
        }

    def _choice(self, completion: Completion) -> dict[str, Any]:
        every = self._tokens(completion, 0, len(completion.tokens))
        return {"index": 0, "finish_reason": completion.finish_reason, **every}

    def _tokens(self, completion: Completion, first: int, last: int) -> dict[str, Any]:
        tokens = completion.tokens[first:last].tolist()
        entries = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, completion.logprobs[first:last].tolist(), strict=True)
        ]
        return {"token_ids": tokens, "logprobs": {"content": entries}}

    def _text(self, tokens: np.ndarray) -> str:
        return str(self.engine.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    @cached_property
    def _fixed_answer(self) -> bytes:
        assert self.engine.fixed is not None
        return msgspec.json.encode(self._answer(np.arange(3, 60), self.engine.fixed))

    @cached_property
    def _fixed_choice(self) -> bytes:
        assert self.engine.fixed is not None
        return msgspec.json.encode({"choices": [self._choice(self.engine.fixed)]})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _request(prompt: np.ndarray) -> GenerationRequest:
    return GenerationRequest(prompt_tokens=prompt, params=SamplingParams(max_tokens=1_024), seed=0)


def _message(said: Mapping[str, Any]) -> Message:
    calls: Sequence[Mapping[str, Any]] = said.get("tool_calls") or ()
    content = said.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    made = [ToolCall(id=each["id"], **each["function"]) for each in calls]
    return Message(role=said["role"], content=content, tool_calls=tuple(made), tool_call_id=said.get("tool_call_id"))


def main(port: int, num_tokens: int | None = None, latency_s: float = 0.0, log: Path | None = None) -> None:
    """Serve until the process is ended.

    Args:
        port: Port on 127.0.0.1.
        num_tokens: Tokens of the completion that each call gets; none samples at random.
        latency_s: Seconds that each completion takes.
        log: File that each completion is appended to as a line of JSON.
    """
    engine = FakeEngine(make_tokenizer(), num_tokens=num_tokens, latency_s=latency_s, log=log)
    uvicorn.run(Server(engine).app(), host="127.0.0.1", port=port, log_level="critical", access_log=False)


if __name__ == "__main__":
    run_script(main, description=__doc__)
