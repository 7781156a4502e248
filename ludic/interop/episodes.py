"""Turn a peer's record into an episode, whose transcripts become rows of the rollouts table.

Here a record is a rollout, as in verl, TRL, ART and JSONL; ludic.interop.verifiers reads records that are whole
episodes. Pure except for the tokenizer. Raises RefusedRecordError if a record can't be used.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ludic.interop.record import Record, RefusedRecordError
from ludic.interop.transcripts import Transcript, from_conversation, from_texts, single_turn_step, to_message
from ludic.records import FinishReason, Message, Purpose

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GetTokenizer = Callable[[], "PreTrainedTokenizerBase"]
"""Loads the tokenizer; called when the first text must be encoded."""

UNSCORED = "the peer's record has no reward"
"""The error of a rollout without a reward, which is stored and counted but never trained on."""

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length"}
"""finish_reason of the rollouts table, by OpenAI's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode of a peer; a field is None if the peer does not give it."""

    group: str
    """Key shared by the episodes of one group."""
    example: str
    env_name: str | None
    purpose: Purpose
    agent_id: str
    policy_version: int
    policy_version_last: int
    sampling: Mapping[str, Any]
    """The known ones of model, temperature, top_p, top_k, max_tokens and seed."""
    transcripts: tuple[Transcript, ...]
    reward: float | None
    reward_components: Mapping[str, float]
    finish_reason: FinishReason | None
    truncation_reason: str | None
    error: str | None
    extra: Mapping[str, Any]
    metadata: Mapping[str, str]
    not_kept: tuple[str, ...]
    """Names of fields that no column holds and that are too large for metadata."""


def rollout_episode(record: Record, get_tokenizer: GetTokenizer) -> Episode:
    """Return the episode of a record that is a rollout."""
    finish_reason = _finish_reason(record)
    transcripts = tuple(_transcripts(record, get_tokenizer, finish_reason))
    components = record.components()
    reward, error = record.reward(components), record.text("error")
    prompt = _identity(record, transcripts[0])
    metadata, not_kept = record.leftovers()
    return Episode(
        **origin(record, prompt),
        group=group_of(record, prompt),
        agent_id=record.text("agent_id") or "agent",
        sampling=_sampling(record),
        transcripts=transcripts,
        reward=reward,
        reward_components=components,
        finish_reason=finish_reason,
        truncation_reason=record.text("truncation_reason"),
        error=UNSCORED if error is None and reward is None else error,
        extra=record.extra(),
        metadata=metadata,
        not_kept=not_kept,
    )


def _transcripts(
    record: Record, get_tokenizer: GetTokenizer, finish_reason: FinishReason | None
) -> Iterator[Transcript]:
    """Make transcripts from the record's tokens if it has them, else from its conversation, else from its two texts."""
    tokens = record.array("prompt_tokens", np.int32), record.array("response_tokens", np.int32)
    messages = _messages(record)
    if tokens[0] is not None and tokens[1] is not None:
        yield _from_tokens(record, tokens[0], tokens[1], messages, finish_reason)
        return
    completion = record.text("completion")
    if completion is None and messages:
        yield from from_conversation(get_tokenizer(), messages, _sampled(record.get("messages"), messages))
        return
    prompt = record.get("prompt")
    if prompt is None or completion is None:
        raise RefusedRecordError(f"has no {_missing(record)}")
    said = _prompt_messages(prompt)
    prompt_tokens, response_tokens = from_texts(
        get_tokenizer(), prompt if isinstance(prompt, str) else said, completion
    )
    messages = (*said, Message(role="assistant", content=completion))
    yield _from_tokens(record, prompt_tokens, response_tokens, messages, finish_reason)


def _from_tokens(
    record: Record,
    prompt_tokens: np.ndarray,
    response_tokens: np.ndarray,
    messages: Sequence[Message],
    finish_reason: FinishReason | None,
) -> Transcript:
    mask = record.array("action_mask", np.bool_)
    return Transcript(
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        response_logprobs=record.array("response_logprobs", np.float32),
        action_mask=None if mask is None or mask.all() else mask,
        token_rewards=record.array("token_rewards", np.float32),
        messages=tuple(messages),
        agent_steps=() if mask is not None else single_turn_step(len(response_tokens), finish_reason, messages),
    )


def _messages(record: Record) -> tuple[Message, ...]:
    values = record.get("messages")
    if values is None:
        return ()
    if not isinstance(values, list):
        raise RefusedRecordError(f"messages is {str(values)[:60]!r}, wanted a list")
    return tuple(map(to_message, values))


def _prompt_messages(prompt: Any) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return (Message(role="user", content=prompt),)
    if not isinstance(prompt, list):
        raise RefusedRecordError(f"the prompt is {str(prompt)[:60]!r}, wanted text or a list of messages")
    return tuple(map(to_message, prompt))


def _sampled(values: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[int]:
    """Return the indexes of the model's messages: those marked trainable, or, without marks, all of role assistant."""
    if any(value.get("trainable") is not None for value in values):
        return [place for place, value in enumerate(values) if value.get("trainable")]
    return [place for place, message in enumerate(messages) if message.role == "assistant"]


def _missing(record: Record) -> str:
    """Describe the absent fields that a rollout could be made from."""
    fields = record.mapping.fields
    names = [places[0] for field in ("prompt", "completion", "messages") if (places := fields.get(field))]
    absent = [name for name in names if record.values.get(name) is None]
    return " and no ".join(absent) or "prompt and completion"


def _finish_reason(record: Record) -> FinishReason | None:
    found = record.text("finish_reason")
    if found is not None and found not in FINISH_REASONS:
        raise RefusedRecordError(f"finish_reason is {found!r}, wanted {', '.join(FINISH_REASONS)}")
    return None if found is None else FINISH_REASONS[found]


def origin(record: Record, prompt: str) -> dict[str, Any]:
    """Return example, environment, purpose and policy versions of an episode.

    prompt: hashed to identify an example that has no id.
    """
    version = record.integer("policy_version")
    if version is None:
        raise RefusedRecordError(
            f"has no {' or '.join(record.mapping.fields.get('policy_version', ('policy_version',)))}"
        )
    last = record.integer("policy_version_last")
    purpose = record.text("purpose") or "train"
    return {
        "example": record.text("env_example_id") or hashlib.sha256(prompt.encode()).hexdigest()[:12],
        "env_name": record.text("env_name"),
        "purpose": "train" if purpose == "train" else "eval",
        "policy_version": version,
        "policy_version_last": version if last is None else last,
    }


def group_of(record: Record, prompt: str) -> str:
    """Return the group key: the peer's own group, else the prompt with its policy_version and environment."""
    given = record.get("group")
    if given is not None:
        return json.dumps(["given", given], default=str)
    return json.dumps([record.integer("policy_version"), record.text("env_name"), prompt])


def _identity(record: Record, first: Transcript) -> str:
    """Return the prompt as JSON, from the record if it has a prompt, else from the first transcript's tokens."""
    prompt = record.get("prompt")
    if prompt is not None:
        return json.dumps(prompt, default=str)
    return json.dumps(first.prompt_tokens.tolist())


def _sampling(record: Record) -> dict[str, Any]:
    found = {
        "model": record.text("model"),
        "temperature": record.number("temperature"),
        "top_p": record.number("top_p"),
        "top_k": record.integer("top_k"),
        "max_tokens": record.integer("max_tokens"),
        "seed": record.integer("seed"),
    }
    return {name: value for name, value in found.items() if value is not None}
