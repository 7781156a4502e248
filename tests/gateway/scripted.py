"""An engine whose tokens a script chooses, with a log of all tokens that it sampled: the oracle of the gateway's tests.

A tiny model rarely writes a valid tool call, so a script writes the turns of an agent's model. The text of a turn is
encoded once, here; its ids are what the rows of the episode must hold. Logprobs are made up: each of the engine's first
million differs from all others, so a token that lands in another place shows.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from chat_templates import CHATML, Family, Said
from transformers import PreTrainedTokenizerFast

from ludic.agents.agent import Agent
from ludic.engines.engine import Completion, GenerationRequest, check_request
from ludic.records.columns import Ragged
from ludic.records.rollout import FinishReason, ToolCall, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the engine does at one call."""

    text: str = ""
    """Encoded with special tokens; the end token follows if finish_reason is stop and none is there."""
    finish_reason: FinishReason = "stop"
    delay_s: float = 0.0
    error: Exception | None = None
    """Raised after the delay; nothing is sampled."""
    new_weights_at: int | None = None
    """Token from which the next version of the weights samples; that version stays."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One call, as the script sees it."""

    number: int
    """Calls before it, from 0."""
    request: GenerationRequest
    tokenizer: PreTrainedTokenizerFast = field(repr=False)

    @cached_property
    def prompt(self) -> str:
        """The prompt with its special tokens."""
        return self.tokenizer.decode(self.request.prompt_tokens.tolist(), skip_special_tokens=False)


@dataclass(slots=True, kw_only=True)
class Sample:
    """One call in the engine's log."""

    number: int
    request: GenerationRequest
    completion: Completion | None = None
    """None if it failed, was cancelled or has not ended."""
    error: BaseException | None = None

    @property
    def tokens(self) -> list[int]:
        """Sampled ids; empty without a completion."""
        return [] if self.completion is None else self.completion.tokens.tolist()

    @property
    def logprobs(self) -> list[float]:
        """As many, nats."""
        return [] if self.completion is None else self.completion.logprobs.tolist()


Script = Sequence[str | Turn] | Callable[[Asked], str | Turn]
"""One turn a call, in the order of the calls; or a function of the call, for calls in any order."""


class ScriptedEngine:
    """Engine of the protocol, without a model. A function as script gives the same tokens for the same request."""

    name = "scripted 1"
    repeats_in_any_batch = True
    max_batch = 256

    def __init__(
        self,
        script: Script,
        *,
        family: Family = CHATML,
        tokenizer: PreTrainedTokenizerFast | None = None,
        max_length: int = 1_000_000,
        policy_version: int = 3,
        journal: Path | None = None,
        first_number: int = 0,
        tokens_a_call: int = 1_024,
    ) -> None:
        """tokenizer: None makes the family's. journal: a file that each sample is appended to as a line of JSON, before
        generate returns it; it outlives a killed process. first_number: of the first call, so that the calls of a
        second life have other logprobs. tokens_a_call: maximum tokens of completions with logprobs of their own.
        """
        self.tokenizer = tokenizer or make_tokenizer(family)
        self.max_length, self.policy_version = max_length, policy_version
        self.log: list[Sample] = []
        """All calls, in the order in which they came."""
        self.num_running = self.most_running = 0
        self._script, self._journal, self._first, self._width = script, journal, first_number, tokens_a_call
        self._stops = {self.tokenizer.eos_token_id, *family.stop_tokens(self.tokenizer)}
        self._lock = threading.Lock()

    async def generate(self, request: GenerationRequest) -> Completion:
        check_request(request, vocab_size=len(self.tokenizer), max_length=self.max_length)
        with self._lock:
            sample = Sample(number=self._first + len(self.log), request=request)
            self.log.append(sample)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            turn = self._turn(sample)
            await asyncio.sleep(turn.delay_s)  # also without a delay: calls at a time take turns
            if turn.error is not None:
                raise turn.error
            sample.completion = self._sampled(sample.number, request, turn)
        except BaseException as error:
            sample.error = error
            raise
        finally:
            with self._lock:
                self.num_running -= 1
        if self._journal is not None:
            _append(self._journal, sample)
        return sample.completion

    def load_weights(self, folder: str, version: int) -> None:
        """There are none: only the version changes."""
        self.policy_version = version

    def _turn(self, sample: Sample) -> Turn:
        asked = Asked(number=sample.number - self._first, request=sample.request, tokenizer=self.tokenizer)
        said = self._script(asked) if callable(self._script) else self._script[asked.number]
        return Turn(text=said) if isinstance(said, str) else said

    def _sampled(self, number: int, request: GenerationRequest, turn: Turn) -> Completion:
        ids = self.tokenizer(turn.text, add_special_tokens=False)["input_ids"]
        stops = self._stops | set(request.params.stop_token_ids)
        ends = [index + 1 for index, token in enumerate(ids) if token in stops]
        if ends:
            ids = ids[: ends[0]]
        elif turn.finish_reason == "stop" or not ids:
            ids = [*ids, self.tokenizer.eos_token_id]
        tokens = np.array(ids[: request.params.max_tokens], np.int32)
        first, last = self.policy_version, self.policy_version
        border = len(tokens) if turn.new_weights_at is None else min(turn.new_weights_at, len(tokens))
        if 0 < border < len(tokens):
            self.policy_version = last = first + 1
        spans = [(first, 0, border), (last, border, len(tokens))]
        return Completion(
            tokens=tokens,
            finish_reason="stop" if int(tokens[-1]) in stops else "length",
            weight_versions=tuple(WeightSpan(version=v, start=a, end=b) for v, a, b in spans if a < b),
            columns=_columns(number * self._width, number, request, tokens),
        )


def _columns(first: int, number: int, request: GenerationRequest, tokens: np.ndarray) -> dict[str, Any]:
    """Arrays of a completion, each of which depends on the call and the position. first: of its logprobs."""
    places = first + np.arange(len(tokens))
    # -1 to -65 in steps of 2**-14, which float32 holds exactly.
    logprobs = -(1 + places % 2**20 / 2**14)
    params = request.params
    columns: dict[str, Any] = {
        "response_logprobs": (logprobs if params.temperature > 0 else 0 * logprobs).astype(np.float32)
    }
    if params.wants_kept_tokens:
        kept = [np.unique([token, place % 256]) for token, place in zip(tokens, places, strict=True)]
        columns["kept_tokens"] = Ragged.of(kept, np.int32)
    if params.return_experts:
        read = np.arange(len(request.prompt_tokens) + len(tokens) - 1)
        columns["experts"] = ((number + read) % 7)[:, None, None].astype(np.int16)
    return columns


def _append(journal: Path, sample: Sample) -> None:
    """Append a sample as one line; a kill of the process leaves whole lines."""
    line = {
        "number": sample.number,
        "prompt": sample.request.prompt_tokens.tolist(),
        "tokens": sample.tokens,
        "logprobs": sample.logprobs,
    }
    with journal.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


# --- Agents and turns ----------------------------------------------------------------------------------------


def make_tokenizer(family: Family = CHATML, *, max_length: int = 1_000_000) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's chat template, for prompts of coding agents (50 kB)."""
    tokenizer = family.tokenizer()
    tokenizer.model_max_length = max_length
    return tokenizer


def scripted_agent(script: Script, *, family: Family = CHATML, **options: Any) -> Agent:
    """An agent whose model follows a script; its `engine` has the log. options: of ScriptedEngine."""
    engine = ScriptedEngine(script, family=family, **options)
    return Agent(
        engine=engine,
        tokenizer=engine.tokenizer,
        model="scripted",
        vocab_size=len(engine.tokenizer),
    )


def says(content: str = "", *calls: tuple[str, dict[str, Any]], thinks: str | None = None) -> str:
    """A turn as a model of CHATML samples it: text, and calls of tools by name and arguments."""
    made = tuple(ToolCall(id="", name=name, arguments=json.dumps(values)) for name, values in calls)
    thought = "" if thinks is None else f"<think>\n{thinks}\n</think>\n\n"
    return thought + CHATML.write(Said(content=content, calls=made))
