"""Read trajectories of the Agent Trajectory Interchange Format (ATIF, up to v1.7; Harbor's trajectory.json).

A file holds one trajectory, or one a line. Where every sampled step has prompt_token_ids and completion_token_ids, the
row has these tokens, with logprobs where all steps have them; else the steps become a conversation, to be tokenized.
ATIF has no reward: it is read from `extra`, as `ludic export --format atif` writes it. Raises RefusedRecordError.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ludic.adapters.imports.episodes import Conversation, ImportedEpisode, ImportedRow, agent_step, row_of
from ludic.adapters.imports.records import (
    ImportRecord,
    NumberedRecords,
    finite_numbers,
    open_file,
    read_records,
    to_array,
)
from ludic.agents import TranscriptBuilder
from ludic.errors import RefusedRecordError
from ludic.records import AgentStep, read_messages, read_tools, refusal

RAW_ARGUMENTS = "raw_arguments"
"""Key of the arguments of a tool call that are no JSON object, in ATIF, which wants one."""
_VERSION = re.compile(r"ATIF-v1\.[0-7]")
_MOST_BYTES = 256 << 20
_SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
_OF_METRICS = ("prompt_token_ids", "completion_token_ids", "logprobs")
Json = Mapping[str, Any]


def read_atif(url: str) -> NumberedRecords:
    """Yield the trajectory that a file is, or those of its lines or of its array."""
    with open_file(url) as file:
        text = file.read(_MOST_BYTES)
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            yield 1, value
            return
    yield from read_records(url)


def atif(record: ImportRecord) -> ImportedEpisode:
    """Return the episode of a trajectory."""
    version = record.text("schema_version") or ""
    if not _VERSION.fullmatch(version):
        raise refusal("schema_version", version, "ATIF-v1.0 to ATIF-v1.7")
    steps, agent = record["steps"], record.object("agent")
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise refusal("steps", steps, "a list of steps")
    extra = record.object("extra")
    messages, sampled = _conversation(steps)
    if not sampled:
        raise RefusedRecordError("steps has no step of the agent")
    metrics = {index: steps[number].get("metrics") or {} for index, number in sampled.items()}
    has_tokens = all(each.get("prompt_token_ids") and each.get("completion_token_ids") for each in metrics.values())
    tools = read_tools(agent.get("tool_definitions"))
    rows: Sequence[ImportedRow | Conversation] = (
        _rows(messages, metrics) if has_tokens else [Conversation(messages=messages, sampled=[*sampled], tools=tools)]
    )
    unused = {
        f"steps[].metrics.{name}": [each[name] for each in metrics.values() if each.get(name)] for name in _OF_METRICS
    }
    correct = extra.get("correct")
    return ImportedEpisode(
        rows=rows,
        columns={
            "episode_reward": ImportRecord(extra).number("episode_reward", "reward"),
            "reward_components": finite_numbers(extra.get("reward_components") or {}),
            "correct": correct if isinstance(correct, bool) else None,
            "model": agent.get("model_name"),
        },
        group=extra.get("group_id"),
        metadata={
            **{name: record.get(name) for name in ("session_id", "trajectory_id", "notes", "schema_version")},
            "agent": " ".join(str(agent[name]) for name in ("name", "version") if agent.get(name)),
        },
        unused={} if has_tokens else {name: value for name, value in unused.items() if value},
    )


def _conversation(steps: Sequence[Json]) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Return messages of OpenAI's chat format, and the index of the step of each message that the agent sampled."""
    messages: list[dict[str, Any]] = []
    sampled: dict[int, int] = {}
    for number, step in enumerate(steps):
        if (role := _SOURCES.get(step.get("source") or "")) is None:
            raise refusal(f"steps[{number}].source", step.get("source"), "system, user or agent")
        message: dict[str, Any] = {"role": role, "content": step.get("message") or ""}
        if role == "assistant":
            if not step.get("is_copied_context"):
                sampled[len(messages)] = number
            message["reasoning"] = step.get("reasoning_content")
            message["tool_calls"] = [_tool_call(call, number) for call in step.get("tool_calls") or ()]
        messages.append({name: value for name, value in message.items() if value or name == "content"})
        messages += _observed(step.get("observation") or {})
    return messages, sampled


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function_name"), str):
        raise refusal(f"steps[{number}].tool_calls", call, "objects with function_name")
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping) and [*arguments] == [RAW_ARGUMENTS]:
        arguments = arguments[RAW_ARGUMENTS]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    function = {"name": call["function_name"], "arguments": text}
    return {"id": str(call.get("tool_call_id") or ""), "type": "function", "function": function}


def _observed(observation: Json) -> Iterator[dict[str, Any]]:
    """Yield a message for each result: of a tool, or of the user where it answers no call."""
    for result in observation.get("results") or ():
        source, content = result.get("source_call_id"), result.get("content") or ""
        if source is None:
            yield {"role": "user", "content": content}
        else:
            yield {"role": "tool", "content": content, "tool_call_id": source}


def _rows(values: Sequence[dict[str, Any]], metrics: Mapping[int, Json]) -> list[ImportedRow]:
    """Return the rows of calls with tokens. metrics: of each sampled message, by its index."""
    read = read_messages(values, "steps", has_tokens=True)
    has_logprobs = all(each.get("logprobs") for each in metrics.values())
    builder = TranscriptBuilder()
    steps: defaultdict[int, list[AgentStep]] = defaultdict(list)
    ends: dict[int, int] = {}
    for turn, (index, each) in enumerate(metrics.items()):
        place = read.sources.index(index)
        prompt, tokens = (to_array(each[name], np.int32) for name in ("prompt_token_ids", "completion_token_ids"))
        columns = {"response_logprobs": to_array(each["logprobs"], np.float32)} if has_logprobs else {}
        try:
            span = builder.add_call(prompt, tokens, columns)
        except ValueError as error:
            raise RefusedRecordError(f"steps: {error}") from None
        said = read.messages[place]
        steps[span.segment_index].append(
            replace(
                agent_step(turn, said, span.start, span.end), action_target="external" if said.tool_calls else "env"
            )
        )
        ends[span.segment_index] = place + 1
    return [
        replace(row_of(transcript, read.messages[: ends[segment]], steps[segment]), unread=read.unread)
        for segment, transcript in enumerate(builder.transcripts())
    ]
