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
from ludic.records import Rollout

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
        values = getattr(completion, name).astype(dtype)
        values[0] = value
        return replace(completion, **{name: values})

    return lie


def keep(*ids: int) -> Callable[[Completion], Completion]:
    return lambda completion: replace(completion, kept_tokens=(np.array(ids),) * len(completion.tokens))


LIES: dict[str, tuple[Callable[[Completion], Completion], str]] = {
    "beyond the vocabulary": (with_first("tokens", 1_000_000, np.int32), "to 1000000, wanted 0 to 63"),
    "one too many": (with_first("tokens", 64, np.int32), "to 64, wanted 0 to 63, which the model knows"),
    "negative": (with_first("tokens", -1, np.int32), "tokens from -1 to"),
    "beyond int32": (with_first("tokens", 2**31, np.int64), "to 2147483648, wanted 0 to 63"),
    "tokens that are floats": (with_first("tokens", 1, np.float32), "of float32, wanted"),
    "above 0": (with_first("logprobs", 5.0, np.float32), "logprob 5, wanted -100 to 0"),
    "infinite": (with_first("logprobs", np.inf, np.float32), "logprob inf, wanted -100 to 0"),
    "minus infinity": (with_first("logprobs", -np.inf, np.float32), "logprob -inf, wanted -100 to 0"),
    "-9999": (with_first("logprobs", -9999.0, np.float32), "logprob -9999, wanted -100 to 0"),
    "too few logprobs": (lambda answer: replace(answer, logprobs=answer.logprobs[1:]), "wanted as many logprobs"),
    "no tokens": (
        lambda answer: replace(answer, tokens=answer.tokens[:0], logprobs=answer.logprobs[:0]),
        "0 tokens and 0 logprobs",
    ),
    "kept tokens": (keep(1, 64), "kept tokens from 1 to 64, wanted 0 to 63"),
    "few kept tokens": (lambda answer: replace(answer, kept_tokens=()), "kept tokens for 0 of"),
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
        play_with(Lying(engine, with_first("logprobs", np.nan, np.float32)), model_folder)


def test_without_a_known_model_each_id_that_a_column_holds_passes(transformers: Engine, model_folder: str) -> None:
    with pytest.raises(EngineError, match="to 2147483648, wanted 0 to 2147483647"):
        play_with(Lying(transformers, LIES["beyond int32"][0]), model_folder, None)


def test_true_answers_pass(engine: Engine, model_folder: str) -> None:
    (row,) = play_with(engine, model_folder)
    assert (row.error, row.response_length) == (None, 8)
