"""Records to Arrow and back, without a Python loop over tokens and without losing a bit.

The schema drives both ways: a column is the attribute of that name, a list of structs is a
tuple of the record in RECORDS. No I/O. Expects a validated batch (ludic.schema.validation);
raises InvalidBatchError for one too large for a column, SchemaError for a foreign table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import UTC
from functools import lru_cache
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import InvalidBatchError
from ludic.records import (
    AgentStep,
    EnvironmentStep,
    Message,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    ToolCall,
)
from ludic.schema.tables import TOKEN_COLUMNS, arrow_schema, conform

RECORDS: dict[str, type] = {
    "agent_steps": AgentStep,
    "environment_steps": EnvironmentStep,
    "messages": Message,
    "tool_calls": ToolCall,
}
"""The record that a struct holds, by the column's name."""

_MAX_ELEMENTS = 2**31 - 1
"""Arrow's list<> counts elements in int32."""


def to_table(batch: RolloutBatch, *, run_id: str, sequence: int) -> pa.Table:
    """The batch's rows, in exactly arrow_schema("rollouts").

    Raises InvalidBatchError when a column would hold more than 2^31 - 1 elements.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    constants = {
        "run_id": run_id,
        "worker_id": batch.metadata.worker_id,
        "sequence": sequence,
        "created_at": batch.metadata.timestamp,
    }
    stamped = {name: [value] * len(rollouts) for name, value in constants.items()}
    stamped["group_key"] = [group.key for group in batch.groups for _ in group.rollouts]
    schema = arrow_schema("rollouts")
    columns = [
        _to_array(stamped[name] if name in stamped else list(map(attrgetter(name), rollouts)), type_, name)
        for name, type_ in zip(schema.names, schema.types, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def from_table(table: pa.Table) -> list[RolloutBatch]:
    """The batches whose rows these are: one for each run of rows with the same worker, sequence and time.

    Consecutive rows of one group_id make a group, so rows that were reordered come back as more
    and smaller groups. Arrays are read-only views into the table's buffers, which they keep alive
    (action masks are unpacked from bits). Raises SchemaError when the table's columns do not fit.
    """
    table = conform(table, "rollouts")
    names = [field.name for field in fields(Rollout)]
    columns = [column_values(table, name) for name in names]
    rollouts = [Rollout(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
    sources = zip(*(column_values(table, name) for name in ("worker_id", "sequence", "created_at")), strict=True)
    rows = zip(sources, column_values(table, "group_key"), rollouts, strict=True)
    return [
        RolloutBatch(
            groups=tuple(_read_groups((key, rollout) for _, key, rollout in part)),
            metadata=RolloutMetadata(worker_id=worker_id, timestamp=created_at.astimezone(UTC)),
        )
        for (worker_id, _, created_at), part in groupby(rows, key=itemgetter(0))
    ]


def _read_groups(rows: Iterator[tuple[str, Rollout]]) -> Iterator[RolloutGroup]:
    for _, members in groupby(rows, key=lambda row: row[1].group_id):
        keys, rollouts = zip(*members, strict=True)
        yield RolloutGroup(key=keys[0], rollouts=rollouts)


def _to_array(values: Sequence[Any], type_: pa.DataType, column: str) -> pa.Array:
    """Python values, one a row, as an Arrow array of exactly this type."""
    if column in TOKEN_COLUMNS:
        return _tokens_to_array(values, type_, column)
    if pa.types.is_list(type_):
        offsets = _offsets(map(len, values), column)
        elements = _to_array(list(chain.from_iterable(values)), type_.value_type, f"{column}[]")
        return pa.ListArray.from_arrays(offsets, elements, type=type_)
    if pa.types.is_map(type_):
        offsets = _offsets(map(len, values), column)
        keys = _to_array(list(chain.from_iterable(values)), type_.key_type, column)
        items = _to_array([item for value in values for item in value.values()], type_.item_type, column)
        return pa.MapArray.from_arrays(offsets, keys, items, type=type_)
    if pa.types.is_struct(type_):
        children = [
            _to_array(list(map(attrgetter(field.name), values)), field.type, f"{column}.{field.name}")
            for field in type_
        ]
        return pa.StructArray.from_arrays(children, fields=list(type_))
    array = pa.array(values, type_)
    if isinstance(array, pa.ChunkedArray):
        raise InvalidBatchError(f"{column} holds more than 2 GiB of text; append fewer groups at once")
    return array


def _tokens_to_array(arrays: Sequence[np.ndarray | None], type_: pa.DataType, column: str) -> pa.Array:
    offsets = _offsets((0 if array is None else len(array) for array in arrays), column)
    dtype = type_.value_type.to_pandas_dtype()
    present = [array for array in arrays if array is not None]
    flat = np.concatenate([np.empty(0, dtype), *present], dtype=dtype, casting="equiv")
    absent = pa.array([array is None for array in arrays], pa.bool_()) if len(present) < len(arrays) else None
    return pa.ListArray.from_arrays(offsets, pa.array(flat, type_.value_type), type=type_, mask=absent)


def _offsets(lengths: Iterator[int], column: str) -> pa.Array:
    """(rows + 1,) int32: where each row's elements begin and the last row's end."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    if ends[-1] > _MAX_ELEMENTS:
        raise InvalidBatchError(
            f"{column} holds {ends[-1]} elements, at most {_MAX_ELEMENTS} fit in one append; "
            "append fewer groups at once"
        )
    return pa.array(ends.astype(np.int32))


def column_values(table: pa.Table, column: str) -> list[Any]:
    """A column of the rollouts table as the values of Rollout: arrays for tokens, records for structs.

    The table needs no other column. Arrays are read-only views, as in from_table.
    """
    # By chunk, since joining chunks would copy and could overflow their offsets.
    return [value for chunk in table[column].chunks for value in _to_values(chunk, column)]


def _to_values(array: pa.Array, column: str) -> list[Any]:
    """The inverse of _to_array, also of a slice."""
    if column in TOKEN_COLUMNS:
        flat = array.flatten().to_numpy(zero_copy_only=not pa.types.is_boolean(array.type.value_type))
        return [flat[part] if part else None for part in _slices(array)]
    if pa.types.is_list(array.type):
        elements = _to_values(array.flatten(), f"{column}[]")
        return [tuple(elements[part]) if part else None for part in _slices(array)]
    if pa.types.is_map(array.type):
        # As a list, since MapArray.keys ignores that an array is a slice of another.
        pairs = array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field])))
        keys, items = (_to_values(child, column) for child in pairs.flatten().flatten())
        return [dict(zip(keys[part], items[part], strict=True)) for part in _slices(pairs) if part]
    if pa.types.is_struct(array.type):
        names = [field.name for field in array.type]
        children = [_to_values(array.field(name), f"{column}.{name}") for name in names]
        record = record_class(column)
        return [record(**dict(zip(names, row, strict=True))) for row in zip(*children, strict=True)]
    values = array.to_pylist()
    if pa.types.is_float32(array.type):
        return [None if value is None else _shortest_decimal(value) for value in values]
    return values


def _slices(array: pa.ListArray) -> list[slice | None]:
    """Where each row's elements lie in array.flatten(), which skips what nulls and slices hide; None for a null."""
    lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    parts = map(slice, (ends - lengths).tolist(), ends.tolist())
    if not array.null_count:
        return list(parts)
    return [part if valid else None for part, valid in zip(parts, array.is_valid().to_pylist(), strict=True)]


def record_class(column: str) -> type:
    """The record that the structs of a column hold, for example of `messages[].tool_calls[]`."""
    return RECORDS[column.rpartition(".")[2].removesuffix("[]")]


@lru_cache(maxsize=1024)
def _shortest_decimal(value: float) -> float:
    """0.7 for the float32 nearest to 0.7: what was set, and stored again as the same float32."""
    return float(str(np.float32(value)))
