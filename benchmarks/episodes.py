"""Measure what the protocol of agents adds: how full it keeps an engine, and its CPU time for each step.

    python -m benchmarks.episodes

The engine here says fixed texts and takes 50 ms for a batch of whatever waits, at most 32 requests. In each of five
steps an agent calls a tool, which waits 0 to 500 ms, and then answers. `batch` is the mean share of 32 over all batches
while at least 32 episodes were running. `one by one` runs the same episodes one after the other, and its time is
computed, not measured.
"""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.measure import print_table
from ludic.agents import Agent, EpisodeLimits, EpisodeRequest, Toolbox, repeat, run_episode, single_agent
from ludic.engines import Completion, GenerationRequest, SamplingParams
from ludic.environments import Example, Split, Transition
from ludic.records import Message, WeightSpan
from ludic.settings import run_script

_LATENCY_S, _LONGEST_TOOL_S = 0.05, 0.5
_MAX_BATCH, _NUM_STEPS = 32, 5
_EXAMPLE = Example(example_id="start", messages=(Message(role="user", content="begin"),))
_CALL = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(quick: bool = False) -> None:
    """Print a table with a row for each number of concurrent episodes.

    Args:
        quick: Run few episodes, to check that the benchmark works.
    """
    rows = [_measure(num) for num in ((4,) if quick else (32, 256))]
    title = (
        f"episodes: {_NUM_STEPS} steps with a tool each, an engine of {_LATENCY_S * 1e3:.0f} ms for up to {_MAX_BATCH}"
    )
    print_table(title, ["episodes", "s", "batch", "of one by one", "CPU ms a call"], rows)


def _measure(num_episodes: int) -> list[str]:
    engine = SlowEngine()
    began, cpu_began = time.perf_counter(), time.process_time()
    asyncio.run(_run(engine, num_episodes))
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    num_calls = 2 * _NUM_STEPS * num_episodes
    assert sum(engine.batches) == num_calls, "a call was lost"
    one_by_one_s = num_calls * _LATENCY_S + num_calls / 2 * _LONGEST_TOOL_S / 2
    full = engine.batches[: len(engine.batches) * 9 // 10]  # then the last episodes end
    share = sum(full) / len(full) / _MAX_BATCH
    columns = (f"{seconds:.1f}", f"{share:.0%}", f"{one_by_one_s / seconds:.0f}x", f"{cpu_s / num_calls * 1e3:.2f}")
    return [str(num_episodes), *columns]


async def _run(engine: "SlowEngine", num_episodes: int) -> None:
    agent = Agent(engine=engine, tokenizer=_tokenizer(), model="slow", toolbox=Toolbox([Wait()]))
    request = EpisodeRequest(
        env_name="five_steps",
        example=_EXAMPLE,
        params=SamplingParams(),
        seed=0,
        group_id="group",
        request_index=0,
    )
    limits = EpisodeLimits(max_steps=_NUM_STEPS)
    requests = repeat(request, num_episodes, 0)
    await asyncio.gather(*(run_episode(single_agent, agent, FiveSteps, each, limits) for each in requests))


class FiveSteps:
    """Environment that goes on until max_steps."""

    def example(self, index: int, split: Split) -> Example:
        return _EXAMPLE

    def reset(self, example: Example) -> tuple[Message, ...]:
        return example.messages

    def step(self, action: str) -> Transition:
        return Transition(observation="go on", reward=0.0, terminated=False)


class Wait:
    """Tool that waits."""

    name = "wait"
    schema: Mapping[str, Any] = {
        "type": "function",
        "function": {"name": "wait", "description": "Wait.", "parameters": {"type": "object", "properties": {}}},
    }

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        await asyncio.sleep(random.random() * _LONGEST_TOOL_S)
        return "done"


@dataclass
class SlowEngine:
    """Engine that answers a tool's result with an answer, and everything else with a call of the tool."""

    name: str = "slow 1"
    max_batch: int = _MAX_BATCH
    repeats_in_any_batch: bool = True
    policy_version: int = 0
    max_length: int = 100_000
    batches: list[int] = field(default_factory=list)
    """Number of requests in each batch."""
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)
    _runner: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._serve())
        await turn
        tokenizer = _tokenizer()
        is_answer = tokenizer.decode(request.prompt_tokens[-32:].tolist()).endswith("<|tool|>done<eos><|assistant|>")
        tokens = np.array(tokenizer("fine" if is_answer else _CALL)["input_ids"] + [tokenizer.eos_token_id], np.int32)
        return Completion(
            tokens=tokens,
            columns={"response_logprobs": np.zeros(len(tokens), np.float32)},
            finish_reason="stop",
            weight_versions=(WeightSpan(version=0, start=0, end=len(tokens)),),
        )

    def load_weights(self, folder: str, version: int) -> None:
        self.policy_version = version

    async def _serve(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
            self.batches.append(len(batch))
            await asyncio.sleep(_LATENCY_S)
            for turn in batch:
                turn.set_result(None)
            await asyncio.sleep(0)


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=_TEMPLATE)


if __name__ == "__main__":
    run_script(main, description=__doc__)
