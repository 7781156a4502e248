"""What any engine answers is checked where an agent takes it, so that a user's own engine can't store a lie either."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from episodes import Script, end, run_episode

from ludic.agents.agent import Agent
from ludic.engines.engine import Completion, Engine, GenerationRequest
from ludic.errors import EngineError, ModelError
from ludic.models.chat import load_tokenizer
from ludic.records.columns import Ragged, with_columns
from ludic.records.rollout import Rollout

VOCABULARY = 64


class Lying:
    """An engine whose completions are changed."""

    def __init__(self, engine: Engine, lie: Callable[[Completion], Completion]) -> None:
        self._engine, self._lie = engine, lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Completion:
        return self._lie(await self._engine.generate(request))


def with_first(name: str, value: float, dtype: Any) -> Callable[[Completion], Completion]:
    def lie(completion: Completion) -> Completion:
        values = (completion.tokens if name == "tokens" else completion.columns[name]).astype(dtype)
        values[0] = value
        return replace(completion, tokens=values) if name == "tokens" else with_columns(completion, **{name: values})

    return lie


def keep(*ids: int) -> Callable[[Completion], Completion]:
    return lambda completion: with_columns(completion, kept_tokens=Ragged.of([ids] * len(completion.tokens), np.int32))


LIES: dict[str, tuple[Callable[[Completion], Completion], str]] = {
    "beyond the vocabulary": (with_first("tokens", 1_000_000, np.int32), "to 1000000, wanted 0 to 63"),
    "one too many": (with_first("tokens", 64, np.int32), "to 64, wanted 0 to 63, which the model knows"),
    "negative": (with_first("tokens", -1, np.int32), "tokens from -1 to"),
    "beyond int32": (with_first("tokens", 2**31, np.int64), "to 2147483648, wanted 0 to 63"),
    "tokens that are floats": (with_first("tokens", 1, np.float32), "tokens are float32 of shape"),
    "above 0": (
        with_first("response_logprobs", 5.0, np.float32),
        "response_logprobs is 5.0 at token 0, wanted the logarithm",
    ),
    "infinite": (
        with_first("response_logprobs", np.inf, np.float32),
        "response_logprobs is inf at token 0, wanted the logarithm",
    ),
    "minus infinity": (
        with_first("response_logprobs", -np.inf, np.float32),
        "response_logprobs is -inf at token 0, wanted the logarithm",
    ),
    "-9999": (
        with_first("response_logprobs", -9999.0, np.float32),
        "response_logprobs is -9999.0 at token 0, wanted the logarithm",
    ),
    "too few logprobs": (
        lambda answer: with_columns(answer, response_logprobs=answer.logprobs[1:]),
        "response_logprobs has length 7, response_tokens has 8",
    ),
    "no logprobs": (lambda answer: with_columns(answer, response_logprobs=None), "no response_logprobs, which each"),
    "logprobs of another type": (with_first("response_logprobs", -1.0, np.float64), "response_logprobs is float64"),
    "no tokens": (
        lambda answer: with_columns(replace(answer, tokens=answer.tokens[:0]), response_logprobs=answer.logprobs[:0]),
        "0 tokens, wanted 1 to 8",
    ),
    "kept tokens": (keep(1, 64), "kept_tokens is 64 at token 0, and 7 more, wanted a token id from 0 to 63"),
    "kept tokens that fall": (keep(4, 1), "kept_tokens is 1 at token 0, and 7 more, wanted sorted numbers"),
    "few kept tokens": (
        lambda answer: with_columns(answer, kept_tokens=Ragged.of([], np.int32)),
        "kept_tokens has length 0, response_tokens has 8",
    ),
    "lists of kept tokens": (lambda answer: with_columns(answer, kept_tokens=()), "kept_tokens is tuple, wanted a Rag"),
    "experts of the completion alone": (
        lambda answer: with_columns(answer, experts=np.zeros((8, 1, 1), np.int16)),
        r"experts has shape \(8, 1, 1\), wanted \d+: prompt_tokens, and response_tokens without the last one",
    ),
    "an array of the transcript": (
        lambda answer: with_columns(answer, action_mask=np.ones(8, bool)),
        "action_mask is not a column that an engine sets, wanted response_logprobs, kept_tokens",
    ),
    "an array that nobody knows": (
        lambda answer: with_columns(answer, guesses=np.ones(8, bool)),
        "guesses is not a column that an engine sets",
    ),
}


def play_with(engine: Any, folder: str, vocab_size: int | None = VOCABULARY) -> list[Rollout]:
    agent = Agent(engine=engine, tokenizer=load_tokenizer(folder), model="tiny", vocab_size=vocab_size)
    return run_episode(agent, Script([end()]), max_tokens=8, accept_incomplete=True)


@pytest.mark.parametrize(("lie", "reason"), LIES.values(), ids=LIES.keys())
def test_no_engine_can_answer_what_the_model_can_t(engine: Engine, model_folder: str, lie: Any, reason: str) -> None:
    with pytest.raises(EngineError, match=f"engine {engine.name} broke its contract: .*{reason}"):
        play_with(Lying(engine, lie), model_folder)


def test_logprobs_that_are_nan_say_that_the_weights_diverged(engine: Engine, model_folder: str) -> None:
    with pytest.raises(ModelError, match="weights of version 0 give NaN"):
        play_with(Lying(engine, with_first("response_logprobs", np.nan, np.float32)), model_folder)


def test_without_a_known_model_each_id_that_a_column_holds_passes(transformers: Engine, model_folder: str) -> None:
    with pytest.raises(EngineError, match="to 2147483648, wanted 0 to 2147483647"):
        play_with(Lying(transformers, LIES["beyond int32"][0]), model_folder, None)


def test_true_answers_pass(engine: Engine, model_folder: str) -> None:
    (row,) = play_with(engine, model_folder)
    assert (row.error, row.response_length) == (None, 8)
