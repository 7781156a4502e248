"""The byte-level tokenizer of `ludic.models.tiny`, and an agent whose model says what a test wants."""

import json
from collections.abc import Sequence
from functools import cache

from gateway.scripted import ScriptedEngine, Turn
from transformers import PreTrainedTokenizerFast

from ludic.agents.agent import Agent
from ludic.models.tiny import train_tokenizer
from ludic.records.rollout import FinishReason

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


def scripted_agent(
    script: Sequence[str | tuple[str, FinishReason]],
    *,
    max_length: int = 100_000,
    delay_s: float = 0.0,
    **options: object,
) -> Agent:
    """An agent whose model says the given texts, one per call; one that is cut off comes without the end token.

    delay_s: of each call. options: of the agent.
    """
    said = [(each, "stop") if isinstance(each, str) else each for each in script]
    turns = [Turn(text=text, finish_reason=reason, delay_s=delay_s) for text, reason in said]
    engine = ScriptedEngine(turns, tokenizer=chat_tokenizer(), max_length=max_length)
    return Agent(engine=engine, tokenizer=engine.tokenizer, model="scripted", **options)
