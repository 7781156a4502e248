"""The byte-level tokenizer of `ludic.models.tiny`, and an engine that says what a test wants."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from transformers import PreTrainedTokenizerFast

from ludic.agents.agent import Agent
from ludic.engines.engine import Completion, GenerationRequest
from ludic.models.tiny import train_tokenizer
from ludic.records.rollout import FinishReason, WeightSpan

# Repeated, so that line breaks and blanks are merged with the words around them, as in large vocabularies.
_CORPUS = [
    "\nassistant\n\nuser\n\n",
    "the answer is\n\n 42\n\n\n",
    ' think </think>\n\n tool_call {"name": "add"}',
] * 50


@cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 entries: any text can be encoded, and tokens merge across line breaks."""
    return train_tokenizer(_CORPUS, vocab_size=400)


def hermes_call(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass
class ScriptedEngine:
    """Says the given texts, one per call; a text that is cut off comes without the end token."""

    script: Sequence[str | tuple[str, FinishReason]]
    name: str = "scripted 1"
    max_length: int = 100_000
    policy_version: int = 3
    delay_s: float = 0.0
    num_asked: int = 0
    tokenizer: PreTrainedTokenizerFast = field(default_factory=chat_tokenizer, repr=False)
    calls: list[tuple[GenerationRequest, Completion]] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Completion:
        said = self.script[self.num_asked]
        self.num_asked += 1
        text, reason = (said, "stop") if isinstance(said, str) else said
        await asyncio.sleep(self.delay_s)
        tokenizer = self.tokenizer
        ids = tokenizer(text or "." * (reason == "length"), add_special_tokens=False)["input_ids"]
        ids += [tokenizer.eos_token_id] * (reason == "stop")
        if len(ids) > request.params.max_tokens:
            ids, reason = ids[: request.params.max_tokens], "length"
        tokens = np.array(ids, np.int32)
        completion = Completion(
            tokens=tokens,
            columns={
                "response_logprobs": -np.minimum(
                    np.arange(1, len(tokens) + 1, dtype=np.float32) / (len(self.calls) + 2), 99
                )
            },
            finish_reason=reason,
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=len(tokens)),),
        )
        self.calls.append((request, completion))
        return completion

    def load_weights(self, folder: str, version: int) -> None:
        self.policy_version = version


def scripted_agent(script: Sequence[str | tuple[str, FinishReason]], **options: object) -> Agent:
    """An agent whose model says the given texts. Options are the agent's, and the engine's max_length and delay_s."""
    of_engine = {name: options.pop(name) for name in ("max_length", "delay_s") if name in options}
    return Agent(engine=ScriptedEngine(script, **of_engine), tokenizer=chat_tokenizer(), model="scripted", **options)
