"""Read episodes of verifiers, which prime-rl logs: message graphs whose paths are token transcripts. Pure.

Raises RefusedRecordError if a record can't be used.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ludic.agents.transcript import RowBuilder, Span
from ludic.interop.imports.episodes import (
    Conversation,
    Episode,
    Row,
    agent_step,
    row_of,
    to_message,
)
from ludic.interop.imports.record import Record, RefusedRecordError, to_array
from ludic.records import AgentStep, FinishReason

Json = Mapping[str, Any]

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length"}
"""finish_reason of the rollouts table, by OpenAI's name."""

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


def prime_rl(record: Record) -> Iterator[Episode]:
    """prime-rl: one episode of verifiers a line; also traces.jsonl of a verifiers evaluation.

    Files: {run_dir}/rollouts/step_{N}/{train,eval}/{all,effective}/traces.jsonl; import either `all` or `effective`,
    since the second repeats a part of the first. Sources: src/prime_rl/monitors/file.py (commit 559b4477) and
    verifiers/v1/{episode,trace,graph}.py (commit a60a606e, both August 2026). Null values are left out of a record.
    The nodes of a trace are a graph; a path from root to leaf is a branch, whose joined token_ids the model saw.
    A trace of a trainable agent becomes an episode of ludic, and each of its branches a row; a node that several
    branches share is sampled in the first of them and context in the others, as prime-rl trains it
    (iter_trainable_branches). Logprobs are of the distribution sampled from (vLLM's processed_logprobs, the default).
    """
    traces = record.get("traces") or []
    record.used.update(("ok", "errors"))
    trained = [trace for trace in traces if trace.get("agent", {}).get("trainable", True)]
    if not trained:
        raise RefusedRecordError(f"has no trace of an agent that is trained{_reason(record.values)}")
    shared = {
        "env_name": record.text("env.name", "env.id"),
        "env_example_id": record.text("task.key", "task.hash"),
        "purpose": "train" if record.text("run.work.type", "file_kind") in (None, "train") else "eval",
        "policy_version": record.integer("run.work.policy.start", "run.work.step", "file_step"),
        "policy_version_last": record.integer("run.work.policy.end"),
    }
    group, episode_id = record.get("group.id"), record.get("id")
    for trace in trained:
        agent_id = trace.get("agent", {}).get("name", "agent")
        unused = {f"trace.{key}": value for key, value in trace.items() if key not in _KNOWN and value not in ([], {})}
        yield Episode(
            rows=_rows(trace),
            columns={**shared, **_outcome(trace), "agent_id": agent_id},
            group=None if group is None else [group, agent_id],
            unused={"episode.id": episode_id, **unused},
        )


def _outcome(trace: Json) -> dict[str, Any]:
    """Return the columns for sampling settings, rewards and how a trace ended."""
    calls = trace.get("calls") or []
    ends = [end for call in calls if (end := call.get("finish_reason"))]
    rewards = {name: part for name, part in (trace.get("rewards") or {}).items() if part}
    components = {name: part["score"] * part.get("weight", 1.0) for name, part in rewards.items()}
    first: Json = next((call["sampling"] for call in calls if call.get("sampling")), {})
    sampling = {"temperature": float, "top_p": float, "max_tokens": int}
    return {
        **{name: kind(first[name]) for name, kind in sampling.items() if first.get(name) is not None},
        "episode_reward": sum(components.values()) if components else None,
        "reward_components": components,
        "finish_reason": FINISH_REASONS.get(ends[-1]) if ends else None,
        "truncation_reason": _TRUNCATION_REASONS.get(trace.get("stop_condition") or ""),
        "error": None if trace.get("ok", True) else f"the trace is not ok{_reason(trace)}",
    }


def _reason(values: Json) -> str:
    """Return the last error of an episode or a trace, after a colon; empty if there is none."""
    errors = values.get("errors") or []
    return f": {errors[-1].get('type')}: {errors[-1].get('message')}" if errors else ""


def _rows(trace: Json) -> list[Row | Conversation]:
    """Return a row for each path from a root to a leaf that has a new sampled node."""
    nodes, calls = trace.get("nodes") or [], trace.get("calls") or []
    parents = {node["parent"] for node in nodes if node.get("parent") is not None}
    ends = {call["node"]: call.get("finish_reason") for call in calls if call.get("node") is not None}
    said: set[int] = set()
    rows: list[Row | Conversation] = []
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        path = _path_to(nodes, leaf)
        new = [index for index in path if nodes[index].get("sampled") and index not in said]
        said.update(new)
        if new and all(nodes[index].get("token_ids") for index in new):
            rows.append(_branch(nodes, path, new, ends))
        elif new:
            # A client without a renderer stores only texts.
            messages = [nodes[index]["message"] for index in path]
            rows.append(Conversation(messages=messages, sampled=[path.index(index) for index in new]))
    if not rows:
        raise RefusedRecordError(f"a trace has no token of the model{_reason(trace)}")
    return rows


def _path_to(nodes: Sequence[Json], leaf: int) -> list[int]:
    path: list[int] = []
    index: int | None = leaf
    while index is not None:
        if index in path or not 0 <= index < len(nodes):
            raise RefusedRecordError(f"the parents of node {leaf} lead nowhere")
        path.append(index)
        index = nodes[index].get("parent")
    return path[::-1]


def _branch(nodes: Sequence[Json], path: Sequence[int], new: Sequence[int], ends: Mapping[int, str | None]) -> Row:
    """Return the row of a path; the response begins with the first sampled token of the nodes `new`."""
    builder = RowBuilder()
    steps: list[AgentStep] = []
    messages = [to_message(nodes[index]["message"]) for index in path]
    for index, message in zip(path, messages, strict=True):
        if index not in new:
            builder.add_context(to_array(nodes[index].get("token_ids") or [], np.int32))
        elif spans := _add_sampled(builder, index, nodes[index]):
            finish_reason = FINISH_REASONS.get(ends.get(index) or "")
            start, end = spans[0].start, spans[-1].end
            steps.append(agent_step(len(steps), message, start, end, finish_reason))
    if not steps:
        raise RefusedRecordError("no token of a branch was sampled")
    return row_of(builder.transcript(), messages, steps)


def _add_sampled(builder: RowBuilder, index: int, node: Json) -> list[Span]:
    """Add the tokens of a node by its mask; return the spans of the sampled ones."""
    tokens, mask = to_array(node["token_ids"], np.int32), to_array(node.get("mask") or [], np.bool_)
    if len(mask) != len(tokens):
        raise RefusedRecordError(f"node {index} has {len(tokens)} token_ids and a mask of {len(mask)}")
    found = to_array(node.get("logprobs") or [], np.float32)
    logprobs = np.full(len(tokens), np.nan, np.float32)
    if len(found) == np.count_nonzero(mask):
        logprobs[mask] = found
    spans = []
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(mask)) + 1):
        if mask[part[0]]:
            known = not np.isnan(logprobs[part]).any()
            spans.append(builder.add_completion(tokens[part], logprobs[part] if known else None))
        else:
            builder.add_context(tokens[part])
    return spans
