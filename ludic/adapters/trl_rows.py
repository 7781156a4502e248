"""Turn what a trainer of TRL holds of a generation into rows of the rollouts table, and its logs into metrics.

Pure: no store, no communication. Rows are dicts of columns, as `ludic.record` takes them.
"""

# Shapes: B = rows of one rank's generation, F = reward functions, T = longest completion.
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from itertools import groupby, pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from ludic.adapters.imports.episodes import agent_step, wanted_text
from ludic.adapters.imports.importing import SMALL
from ludic.base import shortened, storable
from ludic.errors import RefusedRecordError
from ludic.records import (
    MEDIA,
    MOST_COLUMN_CHARACTERS,
    MOST_WANTED_CHARACTERS,
    AgentStep,
    Message,
    Purpose,
    example_columns,
    read_messages,
    table_from_bytes,
    table_to_bytes,
)

WANTED = ("answer", "solution", "ground_truth", "gold", "target", "expected_answer", "reference_answer")
"""Columns of data sets that hold the wanted answer; the first one that a row has becomes the column `wanted`."""
UNSCORED = "no reward function gave this completion a reward"
MASKED = "mask_truncated_completions"
"""Reason for which a step leaves a row out: it was cut, and the trainer's setting of that name masks it."""
_NOT_METADATA = frozenset({"prompt", "completion", "completion_ids", *MEDIA})
_LOWEST_LOGPROB = -100.0

_METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "kl": "reference_kl",
    "step_time": "step_s",
    "clip_ratio/region_mean": "clip_fraction",
    "cispo_clip_ratio": "clip_fraction",
}
"""Columns of the metrics table for numbers that TRL logs; the others keep their own names, in the column `other`."""
LOGGED_STEPS = "logged_steps"
"""Name of the number of steps that logged numbers are means of, in the column `other`, where it is not 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the trainer samples; the same for all rows of a generation."""

    columns: Mapping[str, Any]
    """temperature, top_p, top_k, max_tokens, engine."""
    metadata: Mapping[str, str]
    """Settings that have no column, such as min_p."""
    stop_tokens: frozenset[int]
    """A completion that ends with another token was cut, as TRL judges."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What one rank generated and scored in one call, row by row; everything but the arrays is as TRL has it."""

    number: int
    """Counts calls, alike on all ranks."""
    first: int
    """Index of its first row among those of all ranks."""
    version: int
    """Version of the weights that sampled: the trainer's global_step."""
    purpose: Purpose
    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[np.ndarray]
    """(length,) int32 each."""
    tool_masks: Sequence[Sequence[int]] | None
    """1 for tokens of the model, 0 for those of tools and environments; None: all are of the model."""
    prompts: Sequence[Any]
    completions: Sequence[Any]
    inputs: Sequence[Mapping[str, Any]]
    """Row of the data set of each completion."""
    rewards: np.ndarray
    """(B, F) float32; NaN where a function gave no reward."""
    reward_names: Sequence[str]
    """F names, no two alike."""
    totals: np.ndarray
    """(B,) float32: weighted sum of the rewards; NaN where no function gave one."""
    logged: Mapping[str, Sequence[Any]]
    """Columns that reward functions logged with log_extra, (B,) each."""
    sampler_logprobs: Sequence[Sequence[float | None]] | None
    trainer_logprobs: list[np.ndarray | None]
    """(T,) float32 of each row, from a forward pass with the weights that sampled it; None: there was none."""
    env_names: Sequence[str | None]
    not_kept: Counter[str] = field(default_factory=Counter)
    """Number of values that rows can't hold, by the name of their column."""


def distinct(names: Sequence[str]) -> list[str]:
    """Return names with a number behind each that was there before, as functions without names have the same one."""
    found: list[str] = []
    for name in names:
        others = (f"{name} {number}" for number in itertools.count(2))
        found.append(name if name not in found else next(each for each in others if each not in {*found, *names}))
    return found


# --- Rows ------------------------------------------------------------------------------------------------------------


def row_of(generation: Generation, index: int, sampling: Sampling) -> dict[str, Any]:
    """Return a row of a generation, as columns of the rollouts table.

    A value that a row can't hold is counted in `generation.not_kept`. Raises RefusedRecordError for a row with images:
    without them its tokens mean something else.
    """
    _check_media(generation, index)
    response = generation.completion_ids[index]
    mask = None if generation.tool_masks is None else np.asarray(generation.tool_masks[index], bool)
    capture, logprobs = _logprobs(generation, index, len(response), mask)
    total = float(generation.totals[index])
    rewards = zip(generation.reward_names, generation.rewards[index].tolist(), strict=True)
    was_cut = response[-1] not in sampling.stop_tokens
    messages = _messages(generation, index)
    steps = [*_agent_steps(mask, messages)]
    row = {
        **sampling.columns,
        "prompt_tokens": np.asarray(generation.prompt_ids[index], np.int32),
        "response_tokens": response,
        "response_logprobs": logprobs,
        "capture": capture,
        "action_mask": None if mask is None or mask.all() else mask,
        "policy_version": generation.version,
        "policy_version_last": generation.version,
        "purpose": generation.purpose,
        "episode_reward": None if math.isnan(total) else total,
        "reward_components": {name: value for name, value in rewards if not math.isnan(value)},
        "error": UNSCORED if math.isnan(total) else None,
        "finish_reason": "length" if was_cut else "stop",
        "incomplete_completion": was_cut,
        "env_name": generation.env_names[index],
        "num_turns": len(steps) or None,
        "agent_steps": steps or None,
        "messages": messages,
        **_texts(generation, index, sampling),
    }
    return {name: value for name, value in row.items() if value is not None or name == "episode_reward"}


def _check_media(generation: Generation, index: int) -> None:
    columns = [name for name in MEDIA if generation.inputs[index].get(name)]
    texts = (generation.prompts[index], generation.completions[index])
    messages = (message for text in texts if not isinstance(text, str) for message in text)
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    columns += [part["type"] for part in parts if isinstance(part, Mapping) and part.get("type") in MEDIA]
    if columns:
        raise RefusedRecordError(f"it has {columns[0]}, and a root holds texts and tokens alone")


def _logprobs(
    generation: Generation, index: int, length: int, mask: np.ndarray | None
) -> tuple[str, np.ndarray | None]:
    """Return what was kept of the sampling, and the logprobs, (length,) float32; None if there are none."""
    sampler = None if generation.sampler_logprobs is None else generation.sampler_logprobs[index]
    candidates = {"sampler": sampler, "trainer": generation.trainer_logprobs[index]}
    for capture, found in candidates.items():
        if found is None or len(found) < length:
            continue
        values = np.asarray(found[:length], np.float64)  # None, of a token that vLLM could not score, becomes NaN
        values = values if mask is None else np.where(mask, values, 0)
        if np.isfinite(values).all():
            return capture, np.clip(values, _LOWEST_LOGPROB, 0).astype(np.float32)
    return "ids", None


def _messages(generation: Generation, index: int) -> tuple[Message, ...]:
    """Return prompt and completion as messages; without those that can't be read, which are counted."""
    prompt, completion = generation.prompts[index], generation.completions[index]
    if isinstance(prompt, str):
        return (Message(role="user", content=storable(prompt)), Message(role="assistant", content=storable(completion)))
    try:
        read = read_messages([*prompt, *completion], "prompt and completion", has_tokens=True)
    except RefusedRecordError as error:
        generation.not_kept[f"messages ({error})"] += 1
        return ()
    generation.not_kept.update(read.unread)
    return read.messages


def _agent_steps(mask: np.ndarray | None, messages: Sequence[Message]) -> Iterator[AgentStep]:
    """Yield the calls of the model in a row with tools: runs of its own tokens, one for each of its messages.

    None if there is one call, for which the recorder makes the step, or if the messages do not match the runs.
    """
    if mask is None or mask.all():
        return
    ends = np.cumsum([0, *(len([*run]) for _, run in groupby(mask.tolist()))]).tolist()
    runs = [(start, end) for start, end in pairwise(ends) if mask[start]]
    last_question = max((index for index, each in enumerate(messages) if each.role == "user"), default=-1)
    said = [message for message in messages[last_question + 1 :] if message.role == "assistant"]
    if len(said) == len(runs):
        for turn, (message, (start, end)) in enumerate(zip(said, runs, strict=True)):
            yield agent_step(turn, message, start, end)


def _texts(generation: Generation, index: int, sampling: Sampling) -> dict[str, Any]:
    """Return `wanted`, `example_columns` and `metadata` of a row: the data set's, and what reward functions logged."""
    values = {name: value for name, value in generation.inputs[index].items() if name not in _NOT_METADATA}
    name = next((name for name in WANTED if values.get(name) is not None), None)
    wanted = None if name is None else _as_text(values[name], SMALL)
    if wanted is not None and name is not None:
        wanted = shortened(wanted_text(values.pop(name)) or "", MOST_WANTED_CHARACTERS)[0]
    columns: dict[str, Any] = {}
    for column, value in values.items():
        text = _as_text(value, MOST_COLUMN_CHARACTERS)
        if value is None or isinstance(value, str):
            columns[column] = value
        elif text is None or len(text) > MOST_COLUMN_CHARACTERS:
            generation.not_kept[column] += 1
        else:
            columns[column] = json.loads(text)
    metadata = dict(sampling.metadata)
    for column, of_column in generation.logged.items():
        text = _as_text(of_column[index], SMALL)
        if of_column[index] is not None and (text is None or len(text) > SMALL):
            generation.not_kept[column] += 1
        elif text is not None:
            metadata[column] = text
    # Text, which is sent to the rank that records; the recorder cuts it to the setting of its run.
    stored = example_columns(columns, MOST_COLUMN_CHARACTERS)
    return {"wanted": wanted or None, "example_columns": stored, "metadata": metadata}


def _as_text(value: Any, most: int) -> str | None:
    """Return a value as text: text unchanged, others as JSON; None for null and for what JSON can't hold.

    Of a text of more than `most` characters only as many are made as show that: a column may hold megabytes.
    """
    if value is None or isinstance(value, str):
        return None if value is None else storable(value[: most + 1])
    parts, size = list[str](), 0
    try:
        for part in _JSON.iterencode(value):
            parts.append(part)
            size += len(part)
            if size > most:
                break
    except (TypeError, ValueError, RecursionError):
        return None
    return storable("".join(parts))


def _plain(value: Any) -> Any:
    """Return a value of NumPy, PyTorch or datetime as JSON can hold it. Raises TypeError for other objects."""
    if isinstance(value, date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no value of JSON")


_JSON = json.JSONEncoder(ensure_ascii=False, default=_plain)


# --- Metrics ---------------------------------------------------------------------------------------------------------


def metrics_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of TRL's log, those that ludic's metrics have under ludic's names."""
    found = {name: value for name, value in logs.items() if isinstance(value, int | float) and math.isfinite(value)}
    return {_METRICS.get(name, name): float(value) for name, value in found.items()}


# --- Bytes, to send rows to another rank -----------------------------------------------------------------------------

_ARRAYS = {
    "prompt_tokens": pa.list_(pa.int32()),
    "response_tokens": pa.list_(pa.int32()),
    "response_logprobs": pa.list_(pa.float32()),
    "action_mask": pa.list_(pa.bool_()),
}


_RECORDS = {"messages": tuple[Message, ...], "agent_steps": list[AgentStep]}


def to_bytes(rows: Sequence[Mapping[str, Any]], note: Mapping[str, Any]) -> bytes:
    """Return rows and a note of JSON values as an Arrow IPC stream."""
    columns = {name: pa.array([row.get(name) for row in rows], of) for name, of in _ARRAYS.items()}
    others = ({name: value for name, value in row.items() if name not in _ARRAYS} for row in rows)
    columns["others"] = pa.array([msgspec.json.encode(each).decode() for each in others], pa.string())
    table = pa.table(columns).replace_schema_metadata({"note": json.dumps(note)})
    return table_to_bytes(table)


def from_bytes(data: bytes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows and the note of `to_bytes`."""
    table = table_from_bytes(data)
    rows = []
    for number, text in enumerate(table["others"].to_pylist()):
        arrays = {name: table[name][number].values for name in _ARRAYS if table[name][number].is_valid}
        row = {name: values.to_numpy(zero_copy_only=False) for name, values in arrays.items()} | json.loads(text)
        for name, kind in _RECORDS.items():
            if name in row:
                row[name] = msgspec.convert(row[name], kind)
        rows.append(row)
    return rows, json.loads(table.schema.metadata[b"note"])
