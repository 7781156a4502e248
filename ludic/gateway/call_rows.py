"""Make rows of the table calls from the calls of an episode, and calls from stored rows. Pure; no I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from ludic.engines import Completion, SamplingParams
from ludic.errors import one_line
from ludic.gateway.calls import (
    STATUS,
    Answer,
    Backend,
    Caller,
    CallRequest,
    Prompt,
    RefusedCallError,
    SampledCall,
    StoredCall,
)
from ludic.gateway.episode_calls import HeldCall
from ludic.gateway.episodes import OpenEpisode
from ludic.gateway.matching import tools_digest
from ludic.records import Message, Row, WeightSpan, plain_rows
from ludic.root.rows import stored_rows, to_calls_table, whole_messages, whole_prompts

PATHS: Mapping[str, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
"""Path of a call below its episode, by dialect."""
_LATEST = 8
"""Latest calls that are compared with a prompt; agents with more branches at a time store some tokens twice."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A call while it is sampled: what its rows are made of."""

    episode: OpenEpisode
    call: HeldCall
    request: CallRequest
    """With the messages of the call that previous_id names."""
    caller: Caller
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    params: SamplingParams
    """Of the run, shortened by the client."""
    seed: int
    prompt: Prompt | None = None
    """None until it is prepared."""


def intent_row(work: Work) -> dict[str, Any]:
    """Return the row that says that a call was accepted."""
    caller, call = work.caller, work.call
    return {
        "event": "intent",
        "episode_id": work.episode.episode_id,
        "attempt": work.episode.attempt,
        "call_id": call.call_id,
        "dialect": work.request.dialect,
        "path": PATHS[work.request.dialect],
        "request_digest": caller.request_digest,
        "idempotency_digest": caller.idempotency_key,
        "retry_count": caller.retry_count,
        "retry_of": call.retry_of,
        "declared_parent": caller.declared_parent,
        "hints": dict(caller.hints) or None,
        "user_agent": caller.user_agent,
    }


def call_row(
    work: Work, backend: Backend, sampled: SampledCall, message: Message, engine_s: float, earlier: Sequence[StoredCall]
) -> dict[str, Any]:
    """Return the row of an answered call. message: the answer, with ids of tool calls that are unique in the episode.

    earlier: calls that it may be stored as a difference to.
    """
    row = {**_asked_row(work, earlier), "event": "call", "ended_at": datetime.now(UTC), "engine_s": engine_s}
    row |= {"model": backend.model, "engine": backend.engine, "capture": sampled.capture, "answer": message}
    row |= {"finish_reason": sampled.finish_reason, "stop_sequence": sampled.stop_sequence, "status": 200}
    if sampled.usage is not None:
        row["prompt_tokens_counted"], row["completion_tokens_counted"] = sampled.usage
    if sampled.undelivered is not None and len(sampled.undelivered):
        row["undelivered_tokens"] = sampled.undelivered
    completion = sampled.completion
    if completion is not None:
        row |= {**completion.columns, "response_tokens": completion.tokens}
        row |= {
            "weight_versions": completion.weight_versions,
            "policy_version": completion.policy_version,
            "policy_version_last": completion.policy_version_last,
        }
    return row


def failed_row(
    work: Work, backend: Backend, error: RefusedCallError, engine_s: float | None, earlier: Sequence[StoredCall]
) -> dict[str, Any]:
    """Return the row of a call that got an error as answer."""
    row = {**_asked_row(work, earlier), "event": "failed", "ended_at": datetime.now(UTC), "engine_s": engine_s}
    row |= {"model": backend.model, "engine": backend.engine}
    return row | {"status": STATUS[error.reason], "error": one_line(error)}


def without_messages(row: Row) -> dict[str, Any]:
    """Return a row without what the client sent, such as of a call that can't be stored."""
    return {name: value for name, value in row.items() if name not in ("messages", "tools", "asked", "stop")}


def _asked_row(work: Work, earlier: Sequence[StoredCall]) -> dict[str, Any]:
    request, params, prompt = work.request, work.params, work.prompt
    row = intent_row(work) | {
        "began_at": work.began_at,
        "model_asked": request.model,
        "messages": request.messages,
        "tools": request.tools or None,
        "asked": msgspec.json.encode(dict(request.asked)).decode() if request.asked else None,
        "treated": list(request.treated) or None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": params.max_tokens,
        "seed": work.seed,
        "stop": list(request.stop) or None,
    }
    if prompt is None:
        return row
    row["prompt_made"] = prompt.made
    if prompt.messages_extend is not None:
        row |= {"base_messages_call_id": prompt.messages_extend, "base_num_messages": prompt.num_known_messages}
    if prompt.tokens is not None:
        base, length = _base(prompt, earlier)
        row |= {"prompt_tokens": prompt.tokens, "base_call_id": base, "base_length": length}
    return row


def _base(prompt: Prompt, earlier: Sequence[StoredCall]) -> tuple[str | None, int]:
    """Return the call whose tokens share the longest beginning with a prompt, and its length; None and 0 for none.

    Prompts without a parent are alike, too: those of sub-agents share tools, those after a compaction the system
    message.
    """
    assert prompt.tokens is not None
    base, longest = None, 0
    for call in _candidates(prompt, earlier):
        if call.prompt_tokens is None or call.completion is None:
            continue
        length = _shared(prompt.tokens, call.prompt_tokens)
        is_whole = False
        if length == len(call.prompt_tokens):
            added = _shared(prompt.tokens[length:], call.completion.tokens)
            length, is_whole = length + added, added == len(call.completion.tokens)
        if length > longest:
            base, longest = call.call_id, length
        if is_whole:  # it is extended
            break
    return base, longest


def base_of(row: Row) -> tuple[str, int] | None:
    """Return the call whose tokens begin as the prompt of a row, and in how many tokens; None if there is none."""
    return (row["base_call_id"], row["base_length"]) if row.get("base_call_id") is not None else None


def _candidates(prompt: Prompt, earlier: Sequence[StoredCall]) -> Iterator[StoredCall]:
    """Yield the calls to which a prompt may be stored as a difference, the likeliest first."""
    names = (prompt.extends, prompt.messages_extend)
    yield from (each for each in reversed(earlier) if each.call_id in names)
    yield from earlier[: -_LATEST - 1 : -1]


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens that two arrays, (n,) int32, begin with alike."""
    length = min(len(one), len(other))
    if np.array_equal(one[:length], other[:length]):
        return length
    return int((one[:length] != other[:length]).argmax())


def stored_call(work: Work, sampled: SampledCall, message: Message, earlier: Sequence[StoredCall]) -> StoredCall:
    """Return a call as later ones may extend it; arrays beside its tokens are only in its row."""
    prompt, request, completion = work.prompt, work.request, sampled.completion
    messages = request.messages
    if prompt is not None and prompt.messages_extend is not None:  # as its row will be read
        base = next(each for each in earlier if each.call_id == prompt.messages_extend)
        messages = (*(*base.messages, base.answer)[: prompt.num_known_messages], *messages[prompt.num_known_messages :])
    return StoredCall(
        call_id=work.call.call_id,
        messages=messages,
        answer=message,
        tools_digest=tools_digest(request.tools),
        prompt_tokens=None if prompt is None else prompt.tokens,
        completion=None if completion is None else replace(completion, columns={}),
        shown=None if prompt is None else prompt.shown,
    )


def sampled_answer(work: Work, row: Row, sampled: SampledCall, message: Message) -> Answer:
    """Return the answer of a call. row: of `call_row`."""
    completion = sampled.completion
    has_logprobs = completion is not None and sampled.token_texts is not None and work.request.asks_logprobs
    tokens = None if work.prompt is None else work.prompt.tokens
    num_counted = sampled.usage or (None, None)
    return Answer(
        call_id=work.call.call_id,
        created_at=work.began_at,
        model=row["model"],
        message=message,
        finish_reason=sampled.finish_reason,
        stop_sequence=sampled.stop_sequence,
        text=sampled.text,
        prompt_length=_first_known(None if tokens is None else len(tokens), num_counted[0]),
        completion_length=_first_known(None if completion is None else len(completion.tokens), num_counted[1]),
        cached_length=row.get("base_length") or 0,
        token_texts=sampled.token_texts if has_logprobs else None,
        token_logprobs=completion.logprobs if has_logprobs and completion is not None else None,
    )


def calls_table(run_id: str, worker_id: str, found: pa.Table | None, rows: Sequence[Row]) -> pa.Table:
    """Return rows of calls as they are stored, after those that were found stored."""
    stamp = {"run_id": run_id, "worker_id": worker_id}
    made, _ = stored_rows([{"created_at": row["ended_at"], **row, **stamp} for row in rows])
    table = to_calls_table(made)
    return table if found is None else pa.concat_tables([found, table])


# --- From rows ----------------------------------------------------------------------------------------------------


def prompt_digests(calls: pa.Table) -> set[str]:
    """Return the digests of the system messages and tools of calls, which `held_calls` needs."""
    digests = {*calls["system_digest"].to_pylist(), *calls["tools_digest"].to_pylist()}
    return {digest for digest in digests if digest is not None}


def held_calls(calls: pa.Table, prompts: Mapping[str, Any]) -> list[HeldCall]:
    """Return the calls of an episode in the order of their arrival, from its rows, in order of call_id.

    prompts: system messages and tools by digest. A call without an answer is failed, or unfinished. Raises SchemaError
    if calls do not fit together.
    """
    tokens, messages = whole_prompts(calls), whole_messages(calls, prompts)
    found: dict[str, HeldCall] = {}
    for row in plain_rows(calls):
        call = found.setdefault(row["call_id"], _held(row))
        if row["event"] == "failed" and call.state != "stored":
            call.state = "failed"
        elif row["event"] == "call":
            call.state, call.base, call.is_masked = "stored", base_of(row), bool(row["is_masked"])
            call.stored = StoredCall(
                call_id=call.call_id,
                messages=messages[call.call_id],
                answer=_answer(row),
                tools_digest=tools_digest(prompts[row["tools_digest"]]) if row["tools_digest"] else None,
                prompt_tokens=tokens.get(call.call_id),
                completion=_completion(row),
            )
            call.answer = _stored_answer(row, call.stored)
    return [*found.values()]


def _held(row: Row) -> HeldCall:
    return HeldCall(
        call_id=row["call_id"],
        request_digest=row["request_digest"],
        idempotency_key=row["idempotency_digest"],
        retry_count=row["retry_count"] or 0,
        retry_of=row["retry_of"],
        state="unfinished",
    )


def _answer(row: Row) -> Message:
    return msgspec.convert(row["answer"], tuple[Message, ...])[0]


def _completion(row: Row) -> Completion | None:
    if row["response_tokens"] is None:
        return None
    return Completion(
        tokens=np.asarray(row["response_tokens"], np.int32),
        finish_reason="length" if row["finish_reason"] == "length" else "stop",
        weight_versions=tuple(WeightSpan(**each) for each in row["weight_versions"]),
        columns={"response_logprobs": np.asarray(row["response_logprobs"], np.float32)},
    )


def _stored_answer(row: Row, stored: StoredCall) -> Answer:
    completion, began_at = stored.completion, row["began_at"]
    prompt_length, completion_length = row["prompt_length"], None if completion is None else len(completion.tokens)
    return Answer(
        call_id=stored.call_id,
        created_at=began_at if began_at.tzinfo else began_at.replace(tzinfo=UTC),
        model=row["model"],
        message=stored.answer,
        finish_reason=row["finish_reason"],
        stop_sequence=row["stop_sequence"],
        text=stored.answer.content,
        prompt_length=_first_known(prompt_length, row["prompt_tokens_counted"]),
        completion_length=_first_known(completion_length, row["completion_tokens_counted"]),
        cached_length=row["base_length"] or 0,
    )


def _first_known(*counts: int | None) -> int:
    """Return the first number that is known; 0 if none is."""
    return next((count for count in counts if count is not None), 0)
