"""Read trajectories of ATIF, Harbor's Agent Trajectory Interchange Format, as episodes; what `ludic export` adds, too.

A step whose metrics have prompt_token_ids and completion_token_ids is a call of the model. Calls become rows as a
worker's do: a prompt that extends no row, because a context was compacted or forked, starts a new one, and no token is
tokenised. A trajectory without token ids is a conversation for the tokenizer. Sources: harbor.models.trajectories of
harbor 0.26.0 (ATIF-v1.8); docs/interop.md has what is read. Pure, except for reading a file. Raises RefusedRecordError
if a trajectory can't be used, ConfigError if a file can't be read.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np

from ludic.adapters.imports.episodes import Conversation, ImportedEpisode, ImportedRow, agent_step, row_of
from ludic.adapters.imports.records import (
    ImportRecord,
    NumberedRecords,
    finish_reason_of,
    open_file,
    own_columns,
    read_records,
    to_array,
    to_values,
)
from ludic.agents import RowBuilder
from ludic.base import MOST_ROW_BYTES, read_json
from ludic.errors import RefusedRecordError
from ludic.records import AgentStep, Columns, array_columns, read_messages, read_tools, refusal

VERSION = "ATIF-v1.7"
"""The version that an export writes; all of v1 are read, since later ones only add fields."""
OWN = "ludic"
"""Field of an object `extra` with what ATIF has no field for, under the names of the rollouts table."""
ACTION_MASK, REWARDS = "action_mask", "token_rewards"
"""Fields of `extra.ludic` of metrics: arrays of the completion."""
IDS = ("prompt_token_ids", "completion_token_ids")
"""Fields of metrics; of its `extra.ludic` where ludic made the tokens of a text, so that no model sampled them."""
SEGMENT, BORDER, BEHIND = "segment_index", "prompt_length", "following_token_ids"
"""Fields of `extra.ludic` of a step: the number of its row; where the row's response begins, if before the first
sampled token; tokens of the response behind the last completion."""
ARGUMENTS = "arguments"
"""Field of `extra.ludic` of a tool call: the text that the model wrote, where ATIF's object would be another text."""
STEP_FIELDS = ("action_target", "parse_error", "parse_feedback")
"""Fields of an AgentStep that a step of ATIF has in `extra.ludic`."""

_Json = Mapping[str, Any]

_VERSIONS = re.compile(r"ATIF-v1\.\d")
_SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
_STEP = {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics", "extra"}
_READ = _STEP | {"is_copied_context", "llm_call_count"}
_METRICS = {"prompt_token_ids", "completion_token_ids", "logprobs", "prompt_tokens", "completion_tokens", "extra"}


def read_atif(url: str) -> NumberedRecords:
    """Yield the trajectories of a file: one object, as Harbor writes trajectory.json, or a data file with one a row."""
    if PurePosixPath(url).suffix == ".json":
        with open_file(url) as file:
            text = file.read(MOST_ROW_BYTES + 1)
        try:
            whole = msgspec.json.decode(text) if len(text) <= MOST_ROW_BYTES else None
        except (msgspec.MsgspecError, RecursionError):
            whole = None
        if isinstance(whole, dict):
            yield 1, whole
            return
    yield from read_records(url)


def atif(record: ImportRecord) -> Iterator[ImportedEpisode]:
    """ATIF v1.0 to v1.8: one trajectory a record, as Harbor's agents write it to TRIAL/agent/trajectory.json.

    Each trajectory that is embedded as a sub-agent is an episode too. ATIF has no reward: extra.ludic.episode_reward is
    read, as `ludic export --format atif` writes it, else extra.episode_reward or extra.reward.
    """
    version = record.get("schema_version")
    if not isinstance(version, str) or not _VERSIONS.fullmatch(version):
        raise refusal("schema_version", version, "ATIF-v1.0 to ATIF-v1.8")
    yield _episode(record, None, "")
    for number, values in enumerate(_objects(record.get("subagent_trajectories"), "subagent_trajectories")):
        yield _episode(ImportRecord(values), record, f"subagent_trajectories[{number}].")


def _episode(record: ImportRecord, parent: ImportRecord | None, at: str) -> ImportedEpisode:
    """Return the episode of a trajectory. parent: the trajectory that it is embedded in. at: begins names in errors."""
    agent, own, others = _object(record.get("agent"), f"{at}agent"), *_extra(record.values, at)
    record.used.update(("extra", "final_metrics", "subagent_trajectories"))
    columns = own_columns(ours := ImportRecord(own))
    if not own:
        extra = ImportRecord(others)
        columns["episode_reward"] = extra.number("episode_reward", "reward")
        others = extra.rest()
    steps = _objects(record.get("steps"), f"{at}steps")
    if not steps:
        raise refusal(f"{at}steps", record.get("steps"), "a list of steps")
    trajectory = _Trajectory(at)
    for number, step in enumerate(steps):
        trajectory.add(step, f"{at}steps[{number}]")
    group = ours.get("group_id")
    if parent is not None:  # else it would share a baseline with the agent that it worked for
        whole = parent.values.get("trajectory_id") or parent.values.get("session_id")
        group = [whole if group is None else group, agent.get("name"), at]
        others = {**others, **{f"subagent.{name}": value for name, value in record.rest().items()}}
    rows = trajectory.rows(read_tools(agent.get("tool_definitions")))
    if isinstance(rows[0], Conversation):  # which counts only what its messages do not hold
        others = {**others, "not_read": dict(trajectory.unread) or None}
    extra_metrics = _object(record.values.get("final_metrics"), f"{at}final_metrics").get("extra")
    return ImportedEpisode(
        rows=rows,
        columns={**columns, "agent_id": agent.get("name"), "model": agent.get("model_name")},
        group=group,
        metadata=ours.object("metadata"),
        unused={**others, "final_metrics.extra": extra_metrics},
    )


@dataclass(slots=True)
class _Row:
    """A row that grows call by call."""

    builder: RowBuilder = field(default_factory=RowBuilder)
    messages: list[_Json] = field(default_factory=list)
    calls: list[tuple[int, int, int, _Json]] = field(default_factory=list)
    """Index of the message, start and end of the completion in the response, and extra.ludic of the step."""
    rewards: list[tuple[int, np.ndarray]] = field(default_factory=list)
    """Rewards of tokens, from a token of prompt and response on."""


@dataclass(frozen=True, slots=True)
class _Call:
    prompt: np.ndarray
    """(prompt_length,) int32, the whole prompt."""
    tokens: np.ndarray
    """(length,) int32, the completion."""
    mask: np.ndarray
    """(length,) bool, 1 for tokens to train on."""
    arrays: Mapping[str, Sequence[Any]]
    """Lists of the sampler by the name of their column, one value a token."""
    rewards: np.ndarray | None
    """(length,) float32."""

    def cut(self, start: int, end: int, at: str) -> Columns:
        """Return the arrays of a part of the completion. at: the step, for errors."""
        return {name: _cut(name, values, start, end, at) for name, values in self.arrays.items()}


class _Trajectory:
    """The steps of a trajectory, as rows of tokens, and as a conversation."""

    def __init__(self, at: str) -> None:
        self._at = at
        self._rows: dict[int, list[_Row]] = {}
        """By segment_index; 0 in a file of others."""
        self._segment = 0
        self._pending: list[_Json] = []
        """Messages since the last call."""
        self._last: _Row | None = None
        self._messages: list[_Json] = []
        self._sampled: list[int] = []
        """Indexes of the messages of agent steps that may be trained on."""
        self.unread: Counter[str] = Counter()
        """Number of steps with a field that is not read, by its name."""
        self._num_without = 0
        """Number of them without token ids."""

    def add(self, step: _Json, at: str) -> None:
        """Add the next step. at: its name, for errors."""
        own, others = _extra(step, f"{at}.")
        metrics = _object(step.get("metrics"), f"{at}.metrics")
        self._note(step.keys() - _READ, "steps[].", step)
        self._note(metrics.keys() - _METRICS, "steps[].metrics.", metrics)
        self.unread.update(f"steps[].extra.{name}" for name in others)
        said, results = _messages_of(step, own, at)
        segment = own.get(SEGMENT, self._segment)
        if not isinstance(segment, int):
            raise refusal(f"{at}.extra.{OWN}.{SEGMENT}", segment, "a number")
        if segment != self._segment:
            self._segment, self._pending = segment, []
        first = len(self._messages)
        self._messages += [*said, *results]
        self._pending += said
        copied, num_calls = step.get("is_copied_context"), step.get("llm_call_count")
        if not isinstance(copied, bool | None):
            raise refusal(f"{at}.is_copied_context", copied, "true or false")
        if not isinstance(num_calls, int | None):
            raise refusal(f"{at}.llm_call_count", num_calls, "a number")
        if step.get("source") == "agent" and not copied and num_calls != 0:
            self._sampled.append(first)
            call = _call(metrics, f"{at}.metrics") if num_calls in (None, 1) else None
            if call is None:
                self._num_without += 1
            else:
                self._add_call(call, own, at)
        self._pending += results

    def _note(self, names: Iterable[str], prefix: str, values: _Json) -> None:
        self.unread.update(f"{prefix}{name}" for name in names if values[name] is not None)

    def _add_call(self, call: _Call, own: _Json, at: str) -> None:
        rows = self._rows.setdefault(self._segment, [])
        row = next((each for each in reversed(rows) if each.builder.is_extended_by(call.prompt)), None)
        if row is None:
            row = _Row()
            rows.append(row)
        self._last = row
        row.messages += self._pending
        self._pending = []
        behind = _tokens(own.get(BEHIND), f"{at}.extra.{OWN}.{BEHIND}")
        border = _border(own, len(call.prompt), at)
        if border is not None and not len(row.builder):
            row.builder.add_context(call.prompt[:border])
            row.builder.add_completion(call.tokens[:0], call.cut(0, 0, at))
        row.builder.add_context(call.prompt[len(row.builder) :])
        if call.rewards is not None:
            row.rewards.append((len(row.builder), call.rewards))
        borders = [0, *(np.flatnonzero(np.diff(call.mask)) + 1).tolist(), len(call.tokens)]
        spans = []
        for start, end in pairwise(borders):
            if call.mask[start:end].any():
                spans.append(row.builder.add_completion(call.tokens[start:end], call.cut(start, end, at)))
            else:
                row.builder.add_context(call.tokens[start:end])
        row.builder.add_context(behind)
        if spans:
            row.calls.append((len(row.messages) - 1, spans[0].start, spans[-1].end, own))
        elif not len(call.tokens):  # it failed before its first token
            row.messages.pop()

    def rows(self, tools: Sequence[_Json]) -> list[ImportedRow | Conversation]:
        """Return the rows; of a trajectory without token ids the conversation. tools: their schemas."""
        found = [row for rows in self._rows.values() for row in rows]
        if not found:
            if not self._sampled:
                raise RefusedRecordError(f"{self._at}steps has no step of the agent that a model sampled")
            return [Conversation(messages=self._messages, sampled=self._sampled, tools=tools)]
        if self._last is not None:
            self._last.messages += self._pending
        if self._num_without:
            self.unread["steps[] without token ids of one call, which count as context"] = self._num_without
        has_rewards = any(row.rewards for row in found)
        rows = [self._row(row, has_rewards) for row in found]
        return [replace(rows[0], unread={**rows[0].unread, **self.unread}), *rows[1:]]

    def _row(self, row: _Row, has_rewards: bool) -> ImportedRow:
        read = read_messages(row.messages, f"{self._at}messages", has_tokens=True)
        steps = []
        for turn, (index, start, end, own) in enumerate(row.calls):
            said = read.messages[read.sources.index(index)]
            step = agent_step(turn, said, start, end, finish_reason_of(own.get("finish_reason")))
            given = {name: own[name] for name in STEP_FIELDS if own.get(name) is not None}
            try:
                steps.append(msgspec.convert({**msgspec.to_builtins(step), **given}, AgentStep))
            except msgspec.ValidationError as error:
                raise RefusedRecordError(f"extra.{OWN} of a step of {self._at}steps: {error}") from None
        made = row_of(row.builder.transcript(), read.messages, steps)
        columns = dict(made.columns)
        if has_rewards:
            rewards = np.zeros(len(row.builder), np.float32)
            for start, values in row.rewards:
                rewards[start : start + len(values)] = values
            columns[REWARDS] = rewards[len(made.prompt_tokens) :]
        return replace(made, columns=columns, unread=read.unread)


def _call(metrics: _Json, at: str) -> _Call | None:
    """Return the call of a step; None if its metrics have not the ids of prompt and completion."""
    own, _ = _extra(metrics, f"{at}.")
    ids = [own.get(name) if metrics.get(name) is None else metrics[name] for name in IDS]
    prompt, tokens = (_tokens(each, f"{at}.{name}") for each, name in zip(ids, IDS, strict=True))
    if not len(prompt) or ids[1] is None:
        return None
    lists = {name: values for name, values in own.items() if name not in (REWARDS, *IDS)}
    if metrics.get("logprobs") or (metrics.get("logprobs") is not None and not len(tokens)):
        lists["response_logprobs"] = metrics["logprobs"]
    for name, values in {**lists, REWARDS: own.get(REWARDS)}.items():
        if values is not None and (not isinstance(values, list) or len(values) != len(tokens)):
            found = len(values) if isinstance(values, list) else "no list"
            raise RefusedRecordError(f"{at} has {len(tokens)} completion_token_ids, and {found} in {name}")
    mask = lists.pop(ACTION_MASK, None)
    return _Call(
        prompt=prompt,
        tokens=tokens,
        mask=np.ones(len(tokens), np.bool_) if mask is None else _cut(ACTION_MASK, mask, 0, len(mask), at),
        arrays=lists,
        rewards=None if own.get(REWARDS) is None else _cut(REWARDS, own[REWARDS], 0, len(tokens), at),
    )


def _cut(name: str, values: Sequence[Any], start: int, end: int, at: str) -> Any:
    """Return a part of a list as values of its column."""
    column = array_columns().get(name)
    if column is None or not (column.is_along_response):
        raise RefusedRecordError(f"{at} has extra.{OWN}.{name}, wanted an array of the response's tokens")
    try:
        return to_values(column, values[start:end])
    except ValueError:
        raise refusal(f"{at}.{name}", values, f"one {column.dtype} a token") from None


def _border(own: _Json, length: int, at: str) -> int | None:
    border = own.get(BORDER)
    if border is not None and not (isinstance(border, int) and 0 <= border <= length):
        raise refusal(f"{at}.extra.{OWN}.{BORDER}", border, f"a number of 0 to {length} tokens")
    return border


def _tokens(values: Any, name: str) -> np.ndarray:
    try:
        return to_array(values or [], np.int32)
    except ValueError:
        raise refusal(name, values, "a list of int32") from None


# --- Messages -------------------------------------------------------------------------------------------------


def _messages_of(step: _Json, own: _Json, at: str) -> tuple[list[_Json], list[_Json]]:
    """Return the message of a step, none if it only holds an observation, and the messages of its results."""
    source, message = step.get("source"), step.get("message")
    if not isinstance(source, str) or source not in _SOURCES:
        raise refusal(f"{at}.source", source, ", ".join(_SOURCES))
    calls = _objects(step.get("tool_calls"), f"{at}.tool_calls")
    observation = _object(step.get("observation"), f"{at}.observation")
    results = _objects(observation.get("results"), f"{at}.observation.results")
    said = {
        "role": own.get("role", _SOURCES[source]),
        "content": message,
        "name": own.get("name"),
        "reasoning_content": step.get("reasoning_content"),
        "tool_calls": [_tool_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(calls)],
    }
    answers = [_result(each, bool(calls), f"{at}.observation.results[{n}]") for n, each in enumerate(results)]
    only_results = source != "agent" and message in ("", []) and answers
    return [] if only_results else [said], answers


def _tool_call(call: _Json, at: str) -> _Json:
    own, _ = _extra(call, f"{at}.")
    function = {"name": call.get("function_name"), "arguments": own.get(ARGUMENTS, call.get("arguments"))}
    outcome = {name: own[name] for name in ("result", "error") if name in own}
    return {"id": call.get("tool_call_id"), "type": "function", "function": function, **outcome}


def _result(result: _Json, has_calls: bool, at: str) -> _Json:
    """Return the message of a result; without a call of a tool, the agent shows it to the model as a user's message."""
    own, _ = _extra(result, f"{at}.")
    of_call = result.get("source_call_id")
    role = own.get("role", "user" if of_call is None and not has_calls else "tool")
    named = {"tool_call_id": own.get("tool_call_id", of_call)} if role == "tool" else {}
    return {"role": role, "content": result.get("content") or "", "name": own.get("name"), **named}


def arguments_of(text: str) -> tuple[_Json, bool]:
    """Return the arguments of a tool call as ATIF's object, and whether an import of it gives the same text."""
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return {}, False
    call = _tool_call({"function_name": "f", ARGUMENTS: value}, "")
    with suppress(RefusedRecordError):  # NaN, which JSON can't hold
        (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}], has_tokens=True).messages
        return value, message.tool_calls[0].arguments == text
    return {}, False


# --- Objects --------------------------------------------------------------------------------------------------


def _extra(values: _Json, at: str) -> tuple[_Json, dict[str, Any]]:
    """Return extra.ludic of an object, and the other fields of its `extra`."""
    extra = _object(values.get("extra"), f"{at}extra")
    own = _object(extra.get(OWN), f"{at}extra.{OWN}")
    return own, {name: value for name, value in extra.items() if name != OWN and value is not None}


def _object(value: Any, name: str) -> _Json:
    if not isinstance(value, Mapping | None):
        raise refusal(name, value, "an object")
    return value or {}


def _objects(values: Any, name: str) -> list[_Json]:
    if not isinstance(values, list | None) or not all(isinstance(each, Mapping) for each in values or ()):
        raise refusal(name, values, "a list of objects")
    return values or []
