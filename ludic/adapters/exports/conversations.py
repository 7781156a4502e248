"""Export rows as conversations, one a line: trajectories of ATIF v1.7 with token ids and logprobs, or chat messages.

A row is one trajectory: an agent whose context was rewritten, or whose calls forked, has several, with one session_id.
Raises ConfigError if the target exists, QueryError if the SQL of `where` fails.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from ludic.adapters.exports.text import TextReport, chosen_rows, new_sink, write_rows
from ludic.adapters.imports.atif import RAW_ARGUMENTS
from ludic.records import WITHOUT_LOGPROBS
from ludic.root import Root
from ludic.root.rows import Folder

_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_EXTRA = ("episode_reward", "correct", "group_id", "env_name", "env_example_id", "segment_index", "capture")
"""Columns of a row that go into `extra`."""
Row = Mapping[str, Any]
Json = dict[str, Any]


def export_atif(root: Root, target: str | BinaryIO | None, *, table: Folder, where: str | None) -> TextReport:
    """Write a trajectory of ATIF for each row. target: a file that does not exist, or an open file; None is stdout."""
    names = ["schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"]
    rows = ([trajectory[name] for name in names] for trajectory in map(_trajectory, chosen_rows(root, table, where)))
    return write_rows(names, rows, new_sink(target), "atif")


def export_chat(root: Root, target: str | BinaryIO | None, *, table: Folder, where: str | None) -> TextReport:
    """Write the messages of each row in OpenAI's chat format, with its reward. target: as for `export_atif`."""
    found = chosen_rows(root, table, where)
    rows = ([[_chat_message(each) for each in row["messages"]], row["episode_reward"]] for row in found)
    return write_rows(["messages", "episode_reward"], rows, new_sink(target), "chat")


def _chat_message(message: Row) -> Json:
    """Return a message without absent fields."""
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in message["tool_calls"]
    ]
    optional = {
        "name": message["name"],
        "reasoning_content": message["reasoning"],
        "tool_calls": calls,
        "tool_call_id": message["tool_call_id"],
    }
    given = {name: value for name, value in optional.items() if value}
    return {"role": message["role"], "content": message["content"], **given}


def _trajectory(row: Row) -> Json:
    steps = _steps(row)
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": row["episode_id"],
        "trajectory_id": row["rollout_id"],
        "agent": {"name": row["agent_id"], "version": row["engine"] or "unknown", "model_name": row["model"]},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(each["prompt_tokens"] for each in metrics),
            "total_completion_tokens": sum(each["completion_tokens"] for each in metrics),
            "total_steps": len(steps),
        },
        "extra": {
            **{name: row[name] for name in _EXTRA if row[name] is not None},
            "reward_components": dict(row["reward_components"]),
        },
    }


def _steps(row: Row) -> list[Json]:
    """Return a step for each message; a result of a tool is the observation of the step before it."""
    said = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    calls = dict(zip(reversed(said), reversed(row["agent_steps"]), strict=False))
    steps: list[Json] = []
    for index, message in enumerate(row["messages"]):
        if message["role"] == "tool" and steps:
            steps[-1].setdefault("observation", {"results": []})["results"].append(_result(message, steps[-1]))
            continue
        step: Json = {"step_id": len(steps) + 1, "source": _SOURCES.get(message["role"], "user")}
        step["message"] = message["content"]
        if message["role"] == "assistant":
            step |= _agent_step(row, message, calls.get(index))
        steps.append(step)
    return steps


def _agent_step(row: Row, message: Row, call: Row | None) -> Json:
    """Return the fields of a step of the agent. call: its agent step; None for an answer in the row's first prompt."""
    step: Json = {}
    if message["reasoning"]:
        step["reasoning_content"] = message["reasoning"]
    if message["tool_calls"]:
        step["tool_calls"] = [
            {"tool_call_id": each["id"], "function_name": each["name"], "arguments": _arguments(each["arguments"])}
            for each in message["tool_calls"]
        ]
    if call is None:
        return {**step, "is_copied_context": True}
    start, end = call["start"], call["end"]
    prompt, completion = [*row["prompt_tokens"], *row["response_tokens"][:start]], row["response_tokens"][start:end]
    step["metrics"] = {"prompt_tokens": len(prompt), "completion_tokens": len(completion)}
    if row["capture"] != "text":  # ids that ludic made of a text are none that a model sampled
        step["metrics"] |= {"prompt_token_ids": prompt, "completion_token_ids": completion}
    if row["capture"] not in WITHOUT_LOGPROBS:
        step["metrics"]["logprobs"] = row["response_logprobs"][start:end]
    return step


def _arguments(text: str) -> Json:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: text}


def _result(message: Row, step: Json) -> Json:
    known: Sequence[str] = [call["tool_call_id"] for call in step.get("tool_calls", ())]
    source = message["tool_call_id"]
    if source is None and len(known) > len(step["observation"]["results"]):
        source = known[len(step["observation"]["results"])]
    return {**({"source_call_id": source} if source in known else {}), "content": message["content"]}
