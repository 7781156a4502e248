"""Read episodes of verifiers, which prime-rl logs: message graphs whose paths are token transcripts.

A trace of a trainable agent becomes an episode of ludic, and each branch, a path from a root of its graph to a leaf,
becomes a row. A node that several branches share is sampled in the first of them and context in the others, as
prime-rl trains it (iter_trainable_branches). Pure except for the tokenizer. Raises RefusedRecordError if a record can't
be used.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ludic.interop.episodes import FINISH_REASONS, UNSCORED, Episode, GetTokenizer, group_of, origin
from ludic.interop.record import Record, RefusedRecordError, keep_small, to_array
from ludic.interop.transcripts import Transcript, from_conversation, to_message
from ludic.records import AgentStep

Json = Mapping[str, Any]

_TRUNCATION_REASONS = {
    "max_turns": "max_steps",
    "context_length": "context_length",
    "max_input_tokens": "max_seq_len",
    "max_output_tokens": "max_seq_len",
    "max_total_tokens": "max_seq_len",
}
"""truncation_reason of the rollouts table, by stop condition of verifiers that is a limit (Trace.is_truncated)."""

_KNOWN = frozenset({"agent", "nodes", "calls", "rewards", "ok", "errors", "task", "version", "is_completed"})
"""Fields of a trace that are read or redundant."""


def verifiers_episodes(record: Record, get_tokenizer: GetTokenizer) -> Iterator[Episode]:
    """Yield one episode for each trace of a trainable agent. Episodes of one agent in one group share a baseline."""
    traces = record.values.get("traces") or []
    trained = [trace for trace in traces if trace.get("agent", {}).get("trainable", True)]
    if not trained:
        raise RefusedRecordError(f"has no trace of an agent that is trained{_reason(record.values)}")
    for trace in trained:
        yield _episode(record, trace, get_tokenizer)


def _episode(record: Record, trace: Json, get_tokenizer: GetTokenizer) -> Episode:
    nodes, calls = trace.get("nodes") or [], trace.get("calls") or []
    transcripts = tuple(_branches(nodes, calls, get_tokenizer))
    if not transcripts:
        raise RefusedRecordError(f"a trace holds nothing that the model said{_reason(trace)}")
    components = {
        name: part["score"] * part.get("weight", 1.0) for name, part in (trace.get("rewards") or {}).items() if part
    }
    reward = sum(components.values()) if components else None
    failure = None if trace.get("ok", True) else f"the trace is not ok{_reason(trace)}"
    agent_id = trace.get("agent", {}).get("name", "agent")
    prompt = json.dumps(transcripts[0].prompt_tokens.tolist())
    metadata, not_kept = _leftovers(record, trace)
    return Episode(
        **origin(record, prompt),
        group=json.dumps([group_of(record, prompt), agent_id]),
        agent_id=agent_id,
        sampling=_sampling(calls),
        transcripts=transcripts,
        reward=reward,
        reward_components=components,
        finish_reason=FINISH_REASONS.get(next((end for call in calls[::-1] if (end := call.get("finish_reason"))), "")),
        truncation_reason=_TRUNCATION_REASONS.get(trace.get("stop_condition") or ""),
        error=failure or (UNSCORED if reward is None else None),
        extra=record.extra(),
        metadata=metadata,
        not_kept=not_kept,
    )


def _reason(values: Json) -> str:
    """Return the last error of an episode or a trace, after a colon; empty if there is none."""
    errors = values.get("errors") or []
    return f": {errors[-1].get('type')}: {errors[-1].get('message')}" if errors else ""


def _sampling(calls: Sequence[Json]) -> dict[str, Any]:
    """Return temperature, top_p and max_tokens of the first call that has sampling settings."""
    first: Json = next((call["sampling"] for call in calls if call.get("sampling")), {})
    numbers = {"temperature": float, "top_p": float, "max_tokens": int}
    return {name: kind(first[name]) for name, kind in numbers.items() if first.get(name) is not None}


def _leftovers(record: Record, trace: Json) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return Record.leftovers, with the unused fields of the trace and the ids of episode and trace."""
    metadata, not_kept = record.leftovers()
    unnamed = {f"trace.{name}": value for name, value in trace.items() if name not in _KNOWN and value not in ([], {})}
    kept, too_large = keep_small({"episode.id": record.values.get("id")} | unnamed)
    return metadata | kept, (*not_kept, *too_large)


def _branches(nodes: Sequence[Json], calls: Sequence[Json], get_tokenizer: GetTokenizer) -> Iterator[Transcript]:
    """Yield a transcript for each path from a root to a leaf that has a new sampled node."""
    parents = {node["parent"] for node in nodes if node.get("parent") is not None}
    ends = {call["node"]: call.get("finish_reason") for call in calls if call.get("node") is not None}
    said: set[int] = set()
    for leaf in (place for place in range(len(nodes)) if place not in parents):
        path = _path_to(nodes, leaf)
        new = [place for place in path if nodes[place].get("sampled") and place not in said]
        said.update(new)
        if new and all(nodes[place].get("token_ids") for place in new):
            yield _branch(nodes, path, new, ends)
        elif new:
            # A client without a renderer stores only texts.
            messages = [to_message(nodes[place]["message"]) for place in path]
            yield from from_conversation(get_tokenizer(), messages, [path.index(place) for place in new])


def _path_to(nodes: Sequence[Json], leaf: int) -> list[int]:
    path: list[int] = []
    place: int | None = leaf
    while place is not None:
        if place in path or not 0 <= place < len(nodes):
            raise RefusedRecordError(f"the parents of node {leaf} lead nowhere")
        path.append(place)
        place = nodes[place].get("parent")
    return path[::-1]


def _branch(
    nodes: Sequence[Json], path: Sequence[int], new: Sequence[int], ends: Mapping[int, str | None]
) -> Transcript:
    """Concatenate the tokens of a path; the response begins with the first sampled token of the nodes `new`."""
    spans = [_span(place, nodes[place], place in new) for place in path]
    tokens, mask, logprobs = (np.concatenate(parts) for parts in zip(*spans, strict=True))
    if not mask.any():
        raise RefusedRecordError("no token of a branch was sampled")
    first = int(np.argmax(mask))
    bounds = dict(zip(path, np.cumsum([len(span[0]) for span in spans]).tolist(), strict=True))
    steps = [_step(turn, nodes[place], mask[: bounds[place]], first, ends.get(place)) for turn, place in enumerate(new)]
    return Transcript(
        prompt_tokens=tokens[:first],
        response_tokens=tokens[first:],
        response_logprobs=None if np.isnan(logprobs).any() else logprobs[first:],
        action_mask=None if mask[first:].all() else mask[first:],
        messages=tuple(to_message(nodes[place]["message"]) for place in path),
        agent_steps=tuple(steps),
    )


def _span(place: int, node: Json, is_new: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, mask and logprobs of a node, each (length,); NaN for sampled tokens without logprobs."""
    tokens = to_array(node.get("token_ids") or [], np.int32)
    mask = to_array(node.get("mask") or [], np.bool_) if is_new else np.zeros(len(tokens), np.bool_)
    if len(mask) != len(tokens):
        raise RefusedRecordError(f"node {place} has {len(tokens)} token_ids and a mask of {len(mask)}")
    logprobs = np.zeros(len(tokens), np.float32)
    found = to_array(node.get("logprobs") or [], np.float32)
    logprobs[mask] = found if len(found) == np.count_nonzero(mask) else np.nan
    return tokens, mask, logprobs


def _step(turn: int, node: Json, mask: np.ndarray, first: int, finish_reason: str | None) -> AgentStep:
    """Return the agent step of a node. mask: (tokens up to the node's end,)."""
    message = to_message(node["message"])
    sampled = int(np.count_nonzero(to_array(node["mask"], np.bool_)))
    return AgentStep(
        turn=turn,
        action_target="internal" if message.tool_calls else "env",
        start=len(mask) - first - sampled,
        end=len(mask) - first,
        finish_reason=FINISH_REASONS.get(finish_reason or ""),
        action=message.content,
        tool_calls=message.tool_calls,
    )
