"""Turn the completion of a call into the message that its client gets.

Text, thinking and tool calls are told apart; a client's stop text ends the answer, and tokens sampled behind it are not
delivered. Pure; no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from ludic.agents import Agent, begins_thinking, split_thinking, token_at
from ludic.engines import Completion
from ludic.gateway.calls import CallRequest, SampledCall
from ludic.models import decode, without_markup
from ludic.records import Message, ToolCall, array_columns

_OPENING_TOKENS = 16
"""Tokens at the end of a prompt that show whether it has begun the thinking."""


class AnswerReader:
    """Reads the answers of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._tokenizer, self._format = agent.tokenizer, agent.tool_format
        added = {token for token, each in self._tokenizer.added_tokens_decoder.items() if each.special}
        named = {self._tokenizer.convert_tokens_to_ids(name) for name in self._tokenizer.all_special_tokens}
        self.special_tokens = frozenset({*added, *named} - {None})
        """Tokens that are in no text."""
        self._is_special = np.isin(np.arange(max(self.special_tokens, default=-1) + 2), [*self.special_tokens])
        """By token; the last one, which is not, is that of all tokens behind."""

    def stop_tokens(self, stop: Sequence[str]) -> dict[int, str]:
        """Return those stop texts that are one token, by token: the engine can stop at them."""
        found = {}
        for text in stop:
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(tokens) == 1 and self._tokenizer.decode(tokens) == text:
                found[tokens[0]] = text
        return found

    def read(self, request: CallRequest, prompt_tokens: np.ndarray, completion: Completion, seed: int) -> SampledCall:
        """Return the answer. prompt_tokens: (prompt_length,) int32. seed: of the call; ids of tool calls follow from
        it."""
        said = self._cut(completion, len(prompt_tokens), request.stop)
        message = Message(role="assistant", content=said.text)
        if request.dialect != "completions":
            message = self._message(request, prompt_tokens, said, seed)
        has_ended = said.completion.finish_reason == "stop"
        return SampledCall(
            message=message,
            finish_reason="length" if not has_ended else "tool_calls" if message.tool_calls else "stop",
            stop_sequence=said.stop,
            text=said.text,
            completion=said.completion,
            undelivered=said.undelivered,
            token_texts=self.token_texts(said.completion) if request.asks_logprobs else None,
        )

    def token_texts(self, completion: Completion) -> tuple[str, ...]:
        """Return the text of each token."""
        return tuple(self._tokenizer.decode([token]) for token in completion.tokens.tolist())

    def _message(self, request: CallRequest, prompt_tokens: np.ndarray, said: "_Said", seed: int) -> Message:
        has_marks = bool(self._is_special.take(said.completion.tokens[:-1], mode="clip").any())
        text = self._marked_text(said) if has_marks else said.text
        is_thinking = begins_thinking(self._tokenizer.decode(prompt_tokens[-_OPENING_TOKENS:].tolist()))
        thinking, content = split_thinking(text, is_thinking=is_thinking)
        if thinking is not None:
            thinking, content = thinking.strip(), content.lstrip("\n")
        calls: tuple[ToolCall, ...] = ()
        if request.tools:
            found = self._format.parse(content, request.tools)
            calls = tuple(replace(call, id=_call_id(seed, index)) for index, call in enumerate(found.calls))
            content = found.rest if calls else content
        if has_marks:
            content = without_markup(self._tokenizer, content)
            thinking = None if thinking is None else without_markup(self._tokenizer, thinking)
        return Message(role="assistant", content=content, reasoning=thinking, tool_calls=calls)

    def _marked_text(self, said: "_Said") -> str:
        """Return the text with the names of special tokens, by which some model families mark tool calls."""
        tokens = said.completion.tokens
        has_end = int(tokens[-1]) in self.special_tokens
        text: str = self._tokenizer.decode(tokens[: -1 if has_end else None].tolist())
        return text.rpartition(said.stop)[0] if said.stop is not None and said.stop in text else text

    def _cut(self, completion: Completion, prompt_length: int, stop: Sequence[str]) -> "_Said":
        """Cut a completion behind the token that completes a stop text, and the text before the stop text."""
        text = decode(self._tokenizer, completion.tokens)
        # The one that is complete first; of several that are complete at once the longest.
        found = [(at + len(each), at, each) for each in stop if each and (at := text.find(each)) >= 0]
        if found:
            end, start, stopped_by = min(found)
            length = token_at(self._tokenizer, completion.tokens, end) + 1
            behind = completion.tokens[length:]
            return _Said(
                text=text[:start],
                stop=stopped_by,
                completion=_shortened(completion, prompt_length, length),
                undelivered=behind if len(behind) else None,
            )
        at_token = self.stop_tokens(stop).get(int(completion.tokens[-1])) if stop else None
        is_stop = at_token is not None and completion.finish_reason == "stop"
        return _Said(text=text, stop=at_token if is_stop else None, completion=completion, undelivered=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """The delivered part of a completion."""

    text: str
    """Without special tokens, and without the stop text."""
    stop: str | None
    completion: Completion
    undelivered: np.ndarray | None


def _shortened(completion: Completion, prompt_length: int, length: int) -> Completion:
    """Return a completion of its first `length` tokens, which a stop text ended."""
    spans = [replace(each, end=min(each.end, length)) for each in completion.weight_versions if each.start < length]
    return replace(
        completion,
        tokens=completion.tokens[:length],
        finish_reason="stop",
        weight_versions=tuple(spans),
        columns={
            name: array_columns()[name].cut(values, prompt_length, 0, length)
            for name, values in completion.columns.items()
        },
    )


def _call_id(seed: int, index: int) -> str:
    """Return the id of a tool call: nine letters and digits, as Mistral's templates want them."""
    return f"c{blake2b(f'{seed}/{index}'.encode(), digest_size=4).hexdigest()}"
