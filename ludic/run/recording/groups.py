"""Convert a caller's rollouts, dictionaries of columns or Arrow table to groups of rollouts. No I/O.

Raises InvalidBatchError, which names group, row and column, for a key that is not a column and a value that does not
fit its column. The whole batch is validated again before it is stored (ludic.records.validation).
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from ludic.errors import InvalidBatchError, LudicError, one_line, unknown_name
from ludic.records import (
    RECORDS,
    AgentStep,
    ArrayColumn,
    Message,
    Ragged,
    Rollout,
    RolloutGroup,
    array_columns,
    new_id,
    read_messages,
    values_of,
)
from ludic.run.recording.rows import episode_columns, example_id, row_arrays

logger = logging.getLogger(__name__)

GivenRow = Mapping[str, Any]
"""Columns of the rollouts table by name, as a caller gives them."""

_OF_ROLLOUT = frozenset(each.name for each in fields(Rollout)) - {"columns", "extra"}
_NEEDED = ("prompt_tokens", "response_tokens", "episode_reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values for rows that leave them out."""

    sampled_with: Mapping[str, Any]
    """Value of each of ludic.run.recording.rows.SAMPLED_WITH."""
    env_name: str
    extra_columns: Mapping[str, str]
    """The run's own columns, type by name."""
    max_column_characters: int
    policy_version: int
    episode_numbers: Iterator[int]
    """Counter of episodes of this recorder; each number is used once."""


def read_groups(given: Any, defaults: Defaults) -> tuple[list[RolloutGroup], list[str]]:
    """Return the groups, and the rollout_id of each row in the order in which the rows were given.

    given: a sequence of groups, each a RolloutGroup or a sequence of Rollouts or dictionaries; or one Arrow table, or
    anything with `__arrow_c_stream__`, whose column group_id says which rows are a group.
    """
    if hasattr(given, "__arrow_c_stream__"):
        return _of_table(pa.table(given), defaults)
    if isinstance(given, Mapping | str | bytes) or not hasattr(given, "__iter__"):
        raise InvalidBatchError(f"groups is {type(given).__name__}, wanted a sequence of groups, or an Arrow table")
    groups = [_of_group(group, f"group {index}", defaults) for index, group in enumerate(given)]
    return groups, [rollout.rollout_id for group in groups for rollout in group.rollouts]


def _of_table(table: pa.Table, defaults: Defaults) -> tuple[list[RolloutGroup], list[str]]:
    if "group_id" not in table.column_names:
        raise InvalidBatchError("the table has no column group_id, wanted one that says which rows are a group")
    if table["group_id"].null_count:
        raise InvalidBatchError("the table's column group_id holds nulls, wanted the group of each row")
    values = {name: _column(table[name], name) for name in table.column_names}
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    members: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        row["rollout_id"] = row.get("rollout_id") or new_id()
        if not isinstance(row["group_id"], str | int):
            raise InvalidBatchError(f"the table's column group_id is {table['group_id'].type}, wanted texts")
        members.setdefault(row["group_id"], []).append(index)
    groups = [
        _of_group([rows[index] for index in row_indexes], f"group {group_id}", defaults)
        for group_id, row_indexes in members.items()
    ]
    return groups, [row["rollout_id"] for row in rows]


def _column(column: pa.ChunkedArray, name: str) -> list[Any]:
    array = array_columns().get(name)
    if array is None:
        return column.to_pylist(maps_as_pydicts="lossy")
    try:
        return values_of(array, column.cast(array.arrow_type))
    except pa.ArrowException as error:
        raise InvalidBatchError(f"the table's column {name} is {column.type}, wanted {array.arrow_type}") from error


def _of_group(group: Any, where: str, defaults: Defaults) -> RolloutGroup:
    if isinstance(group, RolloutGroup):
        return group
    if isinstance(group, Rollout | Mapping | str) or not hasattr(group, "__iter__"):
        raise InvalidBatchError(f"{where} is {type(group).__name__}, wanted a sequence of rollouts or dictionaries")
    rows = list(group)
    if not rows:
        raise InvalidBatchError(f"{where} is empty, wanted at least one rollout")
    are_rollouts = all(isinstance(row, Rollout) for row in rows)
    try:
        rollouts = tuple(rows if are_rollouts else _rollouts(rows, where, defaults))
    except LudicError:
        raise
    except Exception as error:  # raised for a value whose type can't be an id, a number or a list of numbers
        raise InvalidBatchError(
            f"{where}: a value has the wrong type, {type(error).__name__} was raised: {one_line(error)}"
        ) from error
    return RolloutGroup(key=f"{rollouts[0].env_name}/{rollouts[0].env_example_id}", rollouts=rollouts)


# --- Dictionaries --------------------------------------------------------------------------------------------------


def _rollouts(rows: Sequence[Any], where: str, defaults: Defaults) -> Iterator[Rollout]:
    """Yield the rows of a group. An episode without an id is one row; group_index counts episodes by their place."""
    given = [_read(row, f"{where}, row {index}", defaults.extra_columns) for index, row in enumerate(rows)]
    episode_ids = [row.get("episode_id") or new_id() for row in given]
    indexes = {episode_id: index for index, episode_id in enumerate(dict.fromkeys(episode_ids))}
    numbers = {episode_id: -1 - next(defaults.episode_numbers) for episode_id in indexes}
    group_id = given[0].get("group_id") or new_id()
    prompt = json.dumps(given[0]["prompt_tokens"].tolist())
    last = {episode_id: index for index, episode_id in enumerate(episode_ids)}
    firsts: dict[tuple[str, str], tuple[str, int]] = {}
    for index, (row, episode_id) in enumerate(zip(given, episode_ids, strict=True)):
        rollout_id = row.get("rollout_id") or new_id()
        agent = (episode_id, row.get("agent_id") or "agent")
        first, segment = firsts.get(agent, (rollout_id, 0))
        firsts[agent] = first, segment + 1
        columns = {
            "group_id": group_id,
            "group_index": indexes[episode_id],
            "group_size": len(indexes),
            "request_index": numbers[episode_id],
            "env_name": defaults.env_name,
            "env_example_id": example_id(prompt),
            "policy_version": defaults.policy_version,
            "segment_index": segment,
            "trajectory_id": first,
            **{name: value for name, value in row.items() if value is not None},
            "episode_id": episode_id,
            "rollout_id": rollout_id,
        }
        is_last = index == last[episode_id]
        yield _rollout(columns, is_last, f"{where}, row {index}", defaults)


def _rollout(given: dict[str, Any], is_last: bool, where: str, defaults: Defaults) -> Rollout:
    """Return a row. is_last: whether it is the last of its episode, whose last token has the reward."""
    arrays = {name: given.pop(name) for name in array_columns() if name in given}
    extra = {name: given.pop(name) for name in defaults.extra_columns if name in given}
    if "response_logprobs" not in arrays and given.setdefault("capture", "ids") in ("sampler", "trainer"):
        reason = f"there are no response_logprobs, and capture is {given['capture']!r}; wanted ids or text then"
        raise InvalidBatchError(f"{where}: {reason}")
    most = defaults.max_column_characters
    columns = episode_columns(given, defaults.sampled_with, max_column_characters=most)
    if "agent_steps" not in columns and "action_mask" not in arrays:
        columns["agent_steps"] = _one_step(columns, len(arrays["response_tokens"]))
    columns.setdefault("num_turns", max(1, len(columns.get("agent_steps", ()))))
    try:
        arrays = row_arrays(arrays, columns["episode_reward"] if is_last else None)
    except (LudicError, TypeError) as error:
        raise InvalidBatchError(f"{where}: {error}") from error
    return Rollout(**columns, columns=arrays, extra=extra)


def _one_step(columns: GivenRow, length: int) -> tuple[AgentStep, ...]:
    """Return the step of a response from a single model call."""
    messages = columns.get("messages", ())
    action = messages[-1].content if messages and messages[-1].role == "assistant" else None
    reason = columns["finish_reason"]
    return (AgentStep(turn=0, action_target="env", start=0, end=length, finish_reason=reason, action=action),)


# --- Values --------------------------------------------------------------------------------------------------------


@cache
def _known(extra: tuple[str, ...]) -> frozenset[str]:
    return frozenset([*_OF_ROLLOUT, *array_columns(), *extra])


def _read(row: Any, where: str, extra_columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of a dictionary in the types of Rollout; those that are None are left as they are."""
    if not isinstance(row, Mapping):
        raise InvalidBatchError(f"{where} is {type(row).__name__}, wanted a Rollout or a dictionary of columns")
    known = _known(tuple(extra_columns))
    for name in row:
        if name not in known:
            what = unknown_name("column", str(name), sorted(known))
            raise InvalidBatchError(
                f"{where}: {what}; put other texts under metadata, or declare x_... in extra_columns"
            )
    for name in _NEEDED:
        if name not in row or (row[name] is None and name != "episode_reward"):
            raise InvalidBatchError(f"{where}: there is no {name}; wanted {', '.join(_NEEDED)}")
    return {name: _value(name, value, where) for name, value in row.items()}


def _value(name: str, value: Any, where: str) -> Any:
    value = plain(value)
    if value is None:
        return None
    try:
        if (column := array_columns().get(name)) is not None:
            return as_array(column, value)
        if name == "messages":
            if isinstance(value, tuple) and all(isinstance(each, Message) for each in value):
                return value
            found = read_messages(value, has_tokens=True)
            for field_name in found.unread:
                _warn_of_field(field_name)
            return found.messages
        if name in RECORDS:
            return _as_records(value, RECORDS[name])
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items()}
    except (LudicError, TypeError, ValueError, OverflowError) as error:
        raise InvalidBatchError(f"{where}: {name}: {error}") from error
    return value


@cache
def _warn_of_field(name: str) -> None:
    """Log once per process that a field of messages is not stored."""
    logger.warning("%s is not a stored field of a message; it is left out", name)


def plain(value: Any) -> Any:
    """Return a tensor as a NumPy array, a number of NumPy as Python's, and all else as it is; imports no torch."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach()
        value = (value.float() if value.is_floating_point() else value).cpu().numpy()
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return value.item()
    return value


def as_array(column: ArrayColumn, value: Any) -> Any:
    """Return values in the type of a column. Raises ValueError for numbers that it can't hold unchanged.

    Floats may be rounded to the column's precision.
    """
    if column.num_dimensions == 0:
        return value
    if column.ragged:
        return value if isinstance(value, Ragged) else Ragged.of(map(plain, value), column.dtype)
    found = np.asarray(value)
    if found.ndim != column.num_dimensions:
        raise ValueError(f"has {found.ndim} dimensions, wanted {column.num_dimensions}")
    if found.dtype == column.dtype:
        return found
    with np.errstate(over="ignore", invalid="ignore"):
        cast = found.astype(column.dtype)
    if column.dtype.kind != "f" and not np.array_equal(cast, found):
        raise ValueError(f"holds numbers that {column.dtype} can't hold, such as {found[cast != found][0]}")
    return cast


def _as_records(value: Any, kind: type) -> tuple[Any, ...]:
    """Return records of a kind, given as such or as dictionaries. Raises ValueError for an unknown field."""
    names = {each.name for each in fields(kind)}
    for each in value:
        if isinstance(each, Mapping) and (unknown := sorted(each.keys() - names)):
            raise ValueError(unknown_name("field", unknown[0], sorted(names)))
    return tuple(each if isinstance(each, kind) else msgspec.convert(each, kind) for each in value)
