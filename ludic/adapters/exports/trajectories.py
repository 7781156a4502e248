"""Export episodes as trajectories of ATIF (Harbor) or as chats in OpenAI's form, as JSON Lines.

Reads whole rows, one rollout group in memory; of calls of a gateway also their times and the schemas of their tools.
A trajectory is all rows of one agent in one episode, with its sub-agents embedded; a chat is one row. What neither has
a field for is in `extra.ludic` of a trajectory, and beside the messages of a chat, under the names of the rollouts
table, where `ludic import` reads it. Raises ConfigError if the target exists, QueryError if the SQL fails.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from itertools import groupby, pairwise
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa

from ludic.adapters.exports.text import TextReport, matching_ids, new_sink
from ludic.adapters.imports.atif import (
    ACTION_MASK,
    ARGUMENTS,
    BEHIND,
    BORDER,
    IDS,
    OWN,
    REWARDS,
    SEGMENT,
    STEP_FIELDS,
    VERSION,
    arguments_of,
)
from ludic.base import json_text, open_sink
from ludic.records import (
    CAPTURES,
    WITHOUT_LOGPROBS,
    AgentStep,
    Capture,
    Message,
    Rollout,
    RolloutGroup,
    ToolCall,
    array_columns,
    from_table,
)
from ludic.root import CALLS, Root
from ludic.root.rows import Folder, read_prompt, whole_rows
from ludic.root.sql import open_result

_Json = dict[str, Any]

_COLUMNS = (
    *("env_name", "env_example_id", "purpose", "group_id", "policy_version", "policy_version_last", "engine"),
    *("temperature", "top_p", "top_k", "max_tokens", "seed", "episode_reward", "reward_components", "wanted"),
    *("example_columns", "correct", "truncation_reason", "finish_reason", "error", "metadata"),
)
"""Columns of a row that ATIF and chats have no field for, and an import reads."""
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
"""Roles that an import gives to a source."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EpisodesReport(TextReport):
    """Result of an export of episodes."""

    not_held: Mapping[str, int]
    """Number of rows of which the format could not hold something, by its name."""

    @property
    def remarks(self) -> Sequence[str]:
        return [f"{self.format} does not hold {name}: {number} rows" for name, number in self.not_held.items()]


def atif(root: Root, target: str | BinaryIO | None, *, table: Folder, where: str | None) -> EpisodesReport:
    """The exporter of trajectories, one a line. Arguments as of `export_text`."""
    return _export(root, target, table, where, "atif", _trajectories)


def chat(root: Root, target: str | BinaryIO | None, *, table: Folder, where: str | None) -> EpisodesReport:
    """The exporter of chats, one a line. Arguments as of `export_text`."""
    return _export(root, target, table, where, "chat", _chats)


def _export(
    root: Root,
    target: str | BinaryIO | None,
    table: Folder,
    where: str | None,
    format: str,
    make: Callable[[Sequence[Rollout], "_Calls", Counter[str]], Iterable[_Json]],
) -> EpisodesReport:
    sink, not_held, num_rows = new_sink(target), Counter[str](), 0
    calls = _Calls(root)
    with open_sink(sink) as file:
        for rows in _groups(whole_rows(root, table, matching_ids(root, table, where))):
            for value in make(rows, calls, not_held):
                file.write(json_text(value).encode() + b"\n")
                num_rows += 1
    location = str(sink) if not hasattr(sink, "write") else None
    return EpisodesReport(format=format, location=location, num_rows=num_rows, not_held=dict(not_held))


def _groups(result: pa.RecordBatchReader) -> Iterator[list[Rollout]]:
    """Yield the rows of each group; a group whose rows are not one after the other comes in parts."""
    rollouts = (
        rollout
        for batch in result
        for one in from_table(pa.Table.from_batches([batch]))
        for group in one.groups
        for rollout in group.rollouts
    )
    for _, rows in groupby(rollouts, key=lambda row: row.group_id):
        yield list(rows)


class _Calls:
    """The calls of a root, as far as rows refer to them."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._tools: dict[str, Any] = {}
        self._rows: dict[str, tuple[str | None, str]] = {}
        """Digest of the tools, and time of the answer, by call_id."""
        if any(root.list(CALLS.below())):
            query = "select call_id, tools_digest, ended_at from model_calls where ended_at is not null"
            with open_result([root], query) as result:
                for call_id, digest, ended_at in (row.values() for batch in result for row in batch.to_pylist()):
                    self._rows[call_id] = digest, ended_at.astimezone(UTC).isoformat()

    def times(self, row: Rollout, num_steps: int) -> Sequence[str | None]:
        """Return when each step of a row ended, in ISO 8601; None where that is not known."""
        ids = row.metadata.get("call_ids", "").split()
        found = [self._rows.get(call_id, (None, None))[1] for call_id in ids]
        return found if len(found) == num_steps else [None] * num_steps

    def tools(self, rows: Sequence[Rollout]) -> list[Any] | None:
        """Return the schemas that the model was shown in the last call with any; None if there are none."""
        ids = [call_id for row in rows for call_id in row.metadata.get("call_ids", "").split()]
        digest = next((found for each in reversed(ids) if (found := self._rows.get(each, (None, ""))[0])), None)
        if digest is not None and digest not in self._tools:
            self._tools[digest] = read_prompt(self._root, digest)
        return None if digest is None else self._tools[digest]


# --- What a row has ---------------------------------------------------------------------------------------


def _own(rows: Sequence[Rollout]) -> _Json:
    """Return the columns of an episode that only ludic has; those that differ are of its first row, or its last."""
    values = {name: getattr(rows[-1] if name in _OF_LAST else rows[0], name) for name in _COLUMNS}
    values["policy_version"] = min(row.policy_version for row in rows)
    values["policy_version_last"] = max(row.policy_version_last for row in rows)
    found = msgspec.to_builtins(values, enc_hook=dict)
    # Without a reward the components would be summed.
    return {name: value for name, value in found.items() if name == "episode_reward" or value not in (None, {})}


_OF_LAST = ("finish_reason", "truncation_reason")


def _capture(row: Rollout) -> Capture:
    # Before rollouts 1.8, metadata said that there are no logprobs.
    return row.capture or ("text" if row.metadata.get("logprobs") == "absent" else "sampler")


def _spans(row: Rollout) -> list[AgentStep]:
    """Return the completions of a row; without steps, or where they lack sampled tokens, each run of its mask."""
    mask = np.ones(row.response_length, np.bool_) if row.action_mask is None else row.action_mask
    covered = np.zeros(row.response_length, np.bool_)
    steps = [step for step in row.agent_steps if step.end > step.start]
    for step in steps:
        covered[step.start : step.end] = True
    in_order = all(before.end <= after.start for before, after in pairwise(steps))
    if in_order and covered[mask].all():
        return [step for step in steps if mask[step.start : step.end].any()]
    borders = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [
        AgentStep(turn=turn, action_target="env", start=int(start), end=int(end))
        for turn, (start, end) in enumerate(borders)
    ]


def _said_by(row: Rollout, num_steps: int) -> dict[int, int]:
    """Return the step of each of the last messages of the assistant, by the message's index."""
    said = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    number = min(num_steps, len(said))
    return dict(zip(said[len(said) - number :], range(num_steps - number, num_steps), strict=True))


# --- ATIF -------------------------------------------------------------------------------------------------


_Key = tuple[str, str]
"""Ids of an episode and of a trajectory in it."""


def _trajectories(rows: Sequence[Rollout], calls: _Calls, not_held: Counter[str]) -> Iterator[_Json]:
    """Yield the trajectories of a group; those of sub-agents are in that of the agent that began them."""
    of_row: dict[str, _Key] = {}
    trajectories: dict[_Key, list[Rollout]] = {}
    for row, trajectory_id in zip(rows, RolloutGroup(key="", rollouts=tuple(rows)).trajectory_ids(), strict=True):
        key = row.episode_id, trajectory_id
        of_row[row.rollout_id] = key
        trajectories.setdefault(key, []).append(row)
    documents: dict[_Key, _Json] = {}
    inner: dict[_Key, _Key] = {}
    for key, members in trajectories.items():
        members.sort(key=lambda row: row.segment_index)
        if document := _document(key[1], members, calls, not_held):
            documents[key] = document
            parent = of_row.get(members[0].parent_rollout_id or "")
            if parent not in (None, key):
                inner[key] = parent
    for key in inner:
        outer = key
        while outer in inner:  # a flat list: only the outermost agent's trajectory has sub-agents
            outer = inner[outer]
        if outer in documents:
            documents[outer].setdefault("subagent_trajectories", []).append(documents[key])
    yield from (document for key, document in documents.items() if key not in inner)


def _document(trajectory_id: str, rows: Sequence[Rollout], calls: _Calls, not_held: Counter[str]) -> _Json | None:
    """Return the trajectory of all rows of one agent in one episode; None if it has no message and no token."""
    first, steps = rows[0], list[_Json]()
    for number, row in enumerate(rows):
        before = rows[number - 1].messages if number else ()
        steps += _steps_of_row(row, number, before, calls)
        _note_lost(row, not_held, is_one=len(rows) == 1)
    if not steps:
        not_held["rows without a message and a token"] += len(rows)
        return None
    own = _own(rows)
    own["capture"] = max((_capture(row) for row in rows), key=CAPTURES.index)
    if len(rows) == 1 and first.weight_versions is not None:
        own["weight_versions"] = msgspec.to_builtins(list(first.weight_versions))
    counts = {
        f"total_{name}": sum(step["metrics"][name] for step in steps if "metrics" in step)
        for name in ("prompt_tokens", "completion_tokens")
    }
    agent = {"name": first.agent_id, "version": str(first.policy_version), "model_name": first.model}
    return {
        "schema_version": VERSION,
        "session_id": first.episode_id,
        "trajectory_id": trajectory_id,
        "agent": _without_none({**agent, "tool_definitions": calls.tools(rows)}),
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "final_metrics": {**counts, "total_steps": len(steps)},
        "extra": {OWN: own},
    }


def _note_lost(row: Rollout, not_held: Counter[str], *, is_one: bool) -> None:
    """Count what a trajectory can't hold, besides the environment's own steps."""
    not_held.update(
        name for name in row.columns if (c := array_columns()[name]).set_by == "sampler" and not c.is_along_response
    )
    if row.extra:
        not_held["columns x_*"] += 1
    if row.weight_versions is not None and not is_one:
        not_held["weight_versions of several rows"] += 1
    sampled = np.zeros(row.response_length, np.bool_)
    for step in _spans(row):
        sampled[step.start : step.end] = True
    if row.token_rewards[~sampled].any():
        not_held["token_rewards of tokens that were not sampled"] += 1


def _steps_of_row(row: Rollout, number: int, before: Sequence[Message], calls: _Calls) -> Iterator[_Json]:
    """Yield the steps of a row, the number-th of its trajectory. before: messages of the row before it."""
    spans, segment = _spans(row), {SEGMENT: number} if number else {}
    times, said_by = calls.times(row, len(spans)), _said_by(row, len(spans))

    def call(index: int, message: Message | None = None) -> _Json:
        step = _call_step(row, spans[index], segment, message, is_last=index == len(spans) - 1)
        return step if times[index] is None else {**step, "timestamp": times[index]}

    unsaid = [index for index in range(len(spans)) if index not in said_by.values()]
    last: _Json | None = None
    for index, message in enumerate(row.messages):
        if message.role == "tool":
            last = last or _step("system", "", segment)
            _add_result(last, message)
            continue
        if last is not None:
            yield last
        if index in said_by:
            yield from map(call, unsaid)
            unsaid = []
            last = call(said_by[index], message)
        else:
            last = _step(_SOURCES[message.role], message.content, {**_of_message(message), **segment}, message)
            if message.role == "assistant" or before[index : index + 1] == (message,):
                last["is_copied_context"] = True
    if last is not None:
        yield last
    yield from map(call, unsaid)
    if not spans:  # it failed before its first token
        nothing = AgentStep(turn=0, action_target="env", start=0, end=0)
        yield _call_step(row, nothing, segment, None, is_last=True)


def _step(source: str, content: str, own: Mapping[str, Any], message: Message | None = None) -> _Json:
    said = message or Message(role=_ROLES[source], content=content)
    calls = [_tool_call(call) for call in said.tool_calls]
    step = {"source": source, "message": content, "reasoning_content": said.reasoning, "tool_calls": calls or None}
    return _without_none({**step, "extra": {OWN: dict(own)} if own else None})


def _call_step(
    row: Rollout, span: AgentStep, segment: Mapping[str, int], message: Message | None, *, is_last: bool
) -> _Json:
    """Return the step of a completion. message: what the model said; None takes it from the agent's step."""
    said = message or Message(role="assistant", content=span.action or "", tool_calls=span.tool_calls)
    own = {**_of_message(said), **segment, "finish_reason": span.finish_reason}
    own |= {name: getattr(span, name) for name in STEP_FIELDS if getattr(span, name)}
    if row.response_length and _border_moves(row, span):
        own[BORDER] = row.prompt_length
    if is_last and span.end < row.response_length:
        own[BEHIND] = row.response_tokens[span.end :].tolist()
    step = _step("agent", said.content, _without_none(own), said)
    return {**step, "metrics": _metrics(row, span, is_last=is_last), "llm_call_count": 1}


def _border_moves(row: Rollout, span: AgentStep) -> bool:
    """Return whether the response of a row begins before its first sampled token, which is in this completion."""
    sampled = np.zeros(0, np.intp) if row.action_mask is None else np.flatnonzero(row.action_mask)
    if row.action_mask is None or (len(sampled) and not sampled[0]):
        return False
    return span.start == span.end or span.start <= sampled[0] < span.end


def _metrics(row: Rollout, span: AgentStep, *, is_last: bool) -> _Json:
    """Return the ids, logprobs and other arrays of a completion."""
    start, end = span.start, span.end
    tokens = row.response_tokens[start:end]
    own: _Json = {}
    if row.action_mask is not None and not row.action_mask[start:end].all():
        own[ACTION_MASK] = row.action_mask[start:end].tolist()
    # An import puts the reward at the end of the last row, unless it is told otherwise.
    if row.token_rewards[start:end].any() or (is_last and row.episode_reward):
        own[REWARDS] = row.token_rewards[start:end].tolist()
    for name, values in row.columns.items():
        column = array_columns()[name]
        if column.set_by == "sampler" and column.is_along_response and name != "response_logprobs":
            own[name] = [each.tolist() for each in values[start:end]]
    prompt = np.concatenate([row.prompt_tokens, row.response_tokens[:start]])
    has_logprobs = _capture(row) not in WITHOUT_LOGPROBS
    ids = dict(zip(IDS, (prompt.tolist(), tokens.tolist()), strict=True))
    if _capture(row) == "text":
        own, ids = {**own, **ids}, {}
    metrics = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
        **ids,
        "logprobs": row.response_logprobs[start:end].tolist() if has_logprobs else None,
    }
    return _without_none({**metrics, "extra": {OWN: own} if own else None})


def _of_message(message: Message) -> _Json:
    """Return what a message has that a step has no field for."""
    role = None if message.role in _ROLES.values() else message.role
    return _without_none({"role": role, "name": message.name})


def _tool_call(call: ToolCall) -> _Json:
    value, is_same = arguments_of(call.arguments)
    own = {ARGUMENTS: None if is_same else call.arguments, "result": call.result, "error": call.error}
    own = _without_none(own)
    named = {"tool_call_id": call.id, "function_name": call.name, "arguments": value}
    return {**named, "extra": {OWN: own}} if own else named


def _add_result(step: _Json, message: Message) -> None:
    """Add the message of a tool to the observation of the step before it."""
    calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
    is_known = message.tool_call_id in calls
    own = {
        "role": None if calls else "tool",
        "name": message.name,
        "tool_call_id": None if is_known else message.tool_call_id,
    }
    result = {"source_call_id": message.tool_call_id if is_known else None, "content": message.content}
    own = _without_none(own)
    found = _without_none({**result, "extra": {OWN: own} if own else None})
    step.setdefault("observation", {"results": []})["results"].append(found)


def _without_none(values: Mapping[str, Any]) -> _Json:
    return {name: value for name, value in values.items() if value is not None}


# --- Chats ------------------------------------------------------------------------------------------------


def _chats(rows: Sequence[Rollout], calls: _Calls, not_held: Counter[str]) -> Iterator[_Json]:
    """Yield each row with messages; turns of the assistant that it does not train on have the weight 0."""
    for row in rows:
        if not row.messages:
            not_held["rows without messages"] += 1
            continue
        said_by = _said_by(row, len(_spans(row)))
        messages = [_chat_message(message, index in said_by) for index, message in enumerate(row.messages)]
        ids = {"agent_id": row.agent_id, "model": row.model, "episode_id": row.episode_id}
        tools = calls.tools([row])
        yield {"messages": messages, **({"tools": tools} if tools else {}), **_own([row]), **ids}


def _chat_message(message: Message, is_trained: bool) -> _Json:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return _without_none(
        {
            "role": message.role,
            "content": message.content,
            "name": message.name,
            "reasoning_content": message.reasoning,
            "tool_calls": calls or None,
            "tool_call_id": message.tool_call_id,
            "weight": 0 if message.role == "assistant" and not is_trained else None,
        }
    )
