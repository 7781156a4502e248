"""The scripted engine keeps the engines' contract, and its log tells calls and positions apart."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from gateway.scripted import ScriptedEngine, Turn, says

from ludic.engines.engine import Completion, GenerationRequest, SamplingParams, check_completion, generate_all

KEEPS_ALL = {"top_k": 5, "return_mask": True, "return_experts": True}


def a_request(**params: object) -> GenerationRequest:
    return GenerationRequest(prompt_tokens=np.arange(5, dtype=np.int32), params=SamplingParams(**params), seed=0)


def test_its_completions_keep_the_contract_and_no_two_tokens_share_a_logprob() -> None:
    engine = ScriptedEngine(
        [says("hi", ("run", {"command": "ls"})), Turn(text="cut off", finish_reason="length"), says("bye")]
    )
    requests = [a_request(), a_request(**KEEPS_ALL), a_request(max_tokens=2)]
    completions = generate_all(engine, requests)
    for request, completion in zip(requests, completions, strict=True):
        check_completion(engine.name, request, completion, len(engine.tokenizer))
    assert [each.finish_reason for each in completions] == ["stop", "length", "length"]
    assert engine.tokenizer.decode(completions[0].tokens.tolist()) == (
        'hi\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    )
    logprobs = [value for sample in engine.log for value in sample.logprobs]
    assert len(set(logprobs)) == len(logprobs) == sum(len(each.tokens) for each in completions)


def test_a_function_answers_by_the_prompt_and_failed_and_cancelled_calls_stay_in_the_log(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    turns = {"a": Turn(text="x"), "b": Turn(error=OSError("lost")), "c": Turn(delay_s=60)}
    engine = ScriptedEngine(lambda asked: turns[asked.prompt], journal=journal)

    def asks(text: str) -> GenerationRequest:
        tokens = np.array(engine.tokenizer(text)["input_ids"], np.int32)
        return GenerationRequest(prompt_tokens=tokens, params=SamplingParams(), seed=0)

    async def call() -> list[Completion | BaseException]:
        waiting = asyncio.create_task(engine.generate(asks("c")))
        first, second = await asyncio.gather(*map(engine.generate, map(asks, "ab")), return_exceptions=True)
        waiting.cancel()
        return [first, second, *await asyncio.gather(waiting, return_exceptions=True)]

    good, failed, cancelled = asyncio.run(call())
    assert isinstance(good, Completion)
    assert isinstance(failed, OSError)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert sorted((len(each.tokens), type(each.error).__name__) for each in engine.log) == [
        (0, "CancelledError"), (0, "OSError"), (2, "NoneType"),
    ]  # fmt: skip
    assert [json.loads(line)["tokens"] for line in journal.read_text().splitlines()] == [good.tokens.tolist()]


def test_weights_can_change_within_a_call_and_stay_changed() -> None:
    engine = ScriptedEngine([Turn(text="abcdef", new_weights_at=4), "next"], policy_version=7)
    changed, later = generate_all(engine, [a_request()]) + generate_all(engine, [a_request()])
    assert [(span.version, span.start, span.end) for span in changed.weight_versions] == [(7, 0, 4), (8, 4, 7)]
    assert later.policy_version == 8


def test_a_prompt_that_is_too_long_is_refused() -> None:
    with pytest.raises(Exception, match="lower max_tokens"):
        generate_all(ScriptedEngine(["x"], max_length=100), [a_request()])
