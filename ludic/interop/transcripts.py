"""Make token transcripts of peers' rollouts from conversations or from two texts, and their messages and agent steps.

Pure except for the given tokenizer. Raises RefusedRecordError if a record makes no transcript, ModelError if the
tokenizer has no usable chat template.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ludic.interop.record import RefusedRecordError
from ludic.models.chat import render_prompt
from ludic.records import AgentStep, FinishReason, Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """Tokens, messages and agent steps of one row."""

    prompt_tokens: np.ndarray
    """(prompt_length,) int32."""
    response_tokens: np.ndarray
    """(response_length,) int32; every list below is as long."""
    response_logprobs: np.ndarray | None
    """(response_length,) float32, nats; None if the peer did not write them."""
    action_mask: np.ndarray | None
    """(response_length,) bool; None if all tokens were sampled."""
    token_rewards: np.ndarray | None = None
    """(response_length,) float32; None puts the reward of the episode at its end."""
    messages: tuple[Message, ...]
    agent_steps: tuple[AgentStep, ...]


def from_texts(
    tokenizer: "PreTrainedTokenizerBase", prompt: str | Sequence[Message], completion: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of prompt and completion. A prompt of messages is rendered; a text is encoded unchanged."""
    prompt_tokens = _encode(tokenizer, prompt) if isinstance(prompt, str) else render_prompt(tokenizer, prompt)
    return prompt_tokens, _encode(tokenizer, completion)


def from_conversation(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], sampled: Sequence[int]
) -> Iterator[Transcript]:
    """Yield the rows of a conversation. sampled: indexes of the messages that the model sampled.

    Each of these messages is rendered with the messages before it as prompt, as a request to an engine would be. If a
    prompt does not extend the transcript, because the template rewrites history, it starts a new row, as in a run of
    ludic.
    """
    row: _Row | None = None
    for turn, place in enumerate(sampled):
        prompt = render_prompt(tokenizer, messages[:place])
        completion = _completion(tokenizer, messages[: place + 1], prompt)
        if row is None or not row.is_extended_by(prompt):
            if row is not None:
                yield row.transcript()
            row = _Row(prompt)
        row.add(turn, prompt, completion, messages[: place + 1])
    if row is None:
        raise RefusedRecordError("messages holds none that the model said")
    yield row.transcript()


def single_turn_step(
    length: int, finish_reason: FinishReason | None, messages: Sequence[Message]
) -> tuple[AgentStep, ...]:
    """Return the agent step of a response that is one completion."""
    action = messages[-1].content if messages and messages[-1].role == "assistant" else None
    return (AgentStep(turn=0, action_target="env", start=0, end=length, finish_reason=finish_reason, action=action),)


def to_message(value: Any) -> Message:
    """Convert a message of OpenAI's chat format or of verifiers; tool calls may be JSON text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise RefusedRecordError(f"a message is {str(value)[:60]!r}, wanted an object with role and content")
    calls = value.get("tool_calls") or []
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
        tool_calls = tuple(map(_to_tool_call, calls))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise RefusedRecordError(f"tool_calls of a message is {str(calls)[:60]!r}: {error}") from error
    name = value.get("name")
    return Message(
        role=value["role"],
        content=_content_text(value.get("content")),
        name=name if isinstance(name, str) else None,
        tool_calls=tool_calls,
    )


def _to_tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function", call)
    arguments = function["arguments"]
    return ToolCall(
        id=str(call.get("id", "")),
        name=function["name"],
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
        result=call.get("result"),
        error=call.get("error"),
    )


def _content_text(content: Any) -> str:
    """Return the text of a message, or of its parts joined by newlines; images are left out."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and part.get("text") is not None)


class _Row:
    """A transcript that grows turn by turn."""

    def __init__(self, prompt: np.ndarray) -> None:
        self._prompt = prompt
        self._response = np.zeros(0, np.int32)
        self._mask = np.zeros(0, np.bool_)
        self._steps: list[AgentStep] = []
        self._messages: Sequence[Message] = ()

    def is_extended_by(self, prompt: np.ndarray) -> bool:
        tokens = np.concatenate([self._prompt, self._response])
        return len(prompt) >= len(tokens) and np.array_equal(prompt[: len(tokens)], tokens)

    def add(self, turn: int, prompt: np.ndarray, completion: np.ndarray, messages: Sequence[Message]) -> None:
        """Append the new tokens of the prompt (mask 0), then the completion (mask 1).

        messages: all messages up to the completion, included.
        """
        suffix = prompt[len(self._prompt) + len(self._response) :]
        start = len(self._response) + len(suffix)
        self._response = np.concatenate([self._response, suffix, completion])
        self._mask = np.concatenate([self._mask, np.zeros(len(suffix), np.bool_), np.ones(len(completion), np.bool_)])
        said = messages[-1]
        step = AgentStep(
            turn=turn,
            action_target="internal" if said.tool_calls else "env",
            start=start,
            end=len(self._response),
            action=said.content,
            tool_calls=said.tool_calls,
        )
        self._steps.append(step)
        self._messages = messages

    def transcript(self) -> Transcript:
        return Transcript(
            prompt_tokens=self._prompt,
            response_tokens=self._response,
            response_logprobs=None,
            action_mask=None if self._mask.all() else self._mask,
            messages=tuple(self._messages),
            agent_steps=tuple(self._steps),
        )


def _completion(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], prompt: np.ndarray) -> np.ndarray:
    """Return the tokens that the last message adds to its prompt, (length,) int32, up to the end token."""
    whole = render_prompt(tokenizer, messages, add_generation_prompt=False)
    if not np.array_equal(whole[: len(prompt)], prompt):
        # The template renders a past answer differently from a new one, so encode the answer's text alone.
        return _encode(tokenizer, messages[-1].content)
    completion = whole[len(prompt) :]
    ends = np.flatnonzero(completion == tokenizer.eos_token_id)
    return completion[: ends[0] + 1] if len(ends) else completion


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
