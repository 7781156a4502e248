"""Convert records to Arrow and back, bit for bit and without a Python loop over tokens.

The schema drives both directions: a column is the attribute of the same name, a list of structs is a tuple of the
record in RECORDS, and a run's own columns are in `extra`. No I/O. Expects a validated batch (ludic.records.validation).
Raises InvalidBatchError if a rollout is too large for a column, SchemaError if a table does not fit its schema.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import UTC
from functools import lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from types import GenericAlias
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import InvalidBatchError, SchemaError
from ludic.records.arrays import MAX_ELEMENTS, TooLargeError, check_size, to_arrow, values_of
from ludic.records.columns import ArrayColumn, array_columns
from ludic.records.extra_columns import extra_names
from ludic.records.rollout import (
    AgentStep,
    EnvironmentStep,
    Message,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    ToolCall,
    WeightSpan,
)
from ludic.records.tables import NO_COLUMNS, conform, rollouts_schema

RECORDS: dict[str, type] = {
    "agent_steps": AgentStep,
    "environment_steps": EnvironmentStep,
    "messages": Message,
    "tool_calls": ToolCall,
    "weight_versions": WeightSpan,
}
"""Record class of the structs of a column, by the column's name."""

TokenColumns = Mapping[str, pa.Array]
"""Concatenated token lists of all rows, by column; only columns that are never null."""


def to_table(
    batch: RolloutBatch,
    *,
    run_id: str,
    sequence: int,
    extra_columns: Mapping[str, str] = NO_COLUMNS,
    tokens: TokenColumns | None = None,
) -> pa.Table:
    """Return the batch's rows in exactly rollouts_schema(extra_columns).

    tokens: this batch's token columns, if `validate` has joined them. Rows that exceed Arrow's 32-bit offsets are split
    into several chunks. Raises InvalidBatchError if a single rollout exceeds them.
    """
    schema = rollouts_schema(extra_columns)
    rows = [(group.key, rollout) for group in batch.groups for rollout in group.rollouts]
    stamps = {
        "run_id": run_id,
        "worker_id": batch.metadata.worker_id,
        "sequence": sequence,
        "created_at": batch.metadata.timestamp,
    }
    return pa.concat_tables(_tables(rows, stamps, schema, tokens or {})) if rows else schema.empty_table()


_Row = tuple[str, Rollout]
"""The key of a group, and one of its rollouts."""


def _tables(
    rows: Sequence[_Row], stamps: Mapping[str, Any], schema: pa.Schema, tokens: TokenColumns
) -> Iterator[pa.Table]:
    """Yield all rows as one table, or as halves, again split if needed, if they are too large."""
    try:
        yield _to_table(rows, stamps, schema, tokens)
    except TooLargeError as error:
        if len(rows) == 1:
            raise InvalidBatchError(f"rollout {rows[0][1].rollout_id}: {error}; store it in several") from None
        middle = len(rows) // 2
        yield from _tables(rows[:middle], stamps, schema, {})
        yield from _tables(rows[middle:], stamps, schema, {})


def _to_table(rows: Sequence[_Row], stamps: Mapping[str, Any], schema: pa.Schema, tokens: TokenColumns) -> pa.Table:
    rollouts = [rollout for _, rollout in rows]
    extras = set(extra_names(schema.names))
    indexes = message_indexes(rollouts)
    columns = []
    for name, type_ in zip(schema.names, schema.types, strict=True):
        if name in stamps:
            columns.append(pa.repeat(pa.scalar(stamps[name], type_), len(rows)))
        elif name == "group_key":
            columns.append(_to_array([key for key, _ in rows], type_, name))
        elif name in extras:
            columns.append(_to_array([rollout.extra.get(name) for rollout in rollouts], type_, name))
        elif (array := array_columns().get(name)) is not None:
            columns.append(to_arrow(array, [rollout.columns.get(name) for rollout in rollouts], tokens.get(name)))
        elif name in REFERENCES:
            steps = _to_builtins(list(map(attrgetter(name), rollouts)))
            refer(steps, name, indexes)
            columns.append(_to_array(steps, type_, name))
        else:
            columns.append(_to_array(list(map(attrgetter(name), rollouts)), type_, name))
    return pa.Table.from_arrays(columns, schema=schema)


def from_table(table: pa.Table) -> list[RolloutBatch]:
    """Return the batches of a table: one for each run of rows with the same worker, sequence and time.

    Consecutive rows of one group_id make a group, so reordered rows give more and smaller groups. Arrays are read-only
    views into the table's buffers, which they keep alive (action masks are unpacked from bits).
    Raises SchemaError if the table's columns do not fit.
    """
    extras = _extra_values(table)
    table = conform(table, "rollouts")
    rollouts = _to_rollouts(table, extras)
    sources = zip(*(column_values(table, name) for name in ("worker_id", "sequence", "created_at")), strict=True)
    rows = zip(sources, column_values(table, "group_key"), rollouts, strict=True)
    return [
        RolloutBatch(
            groups=tuple(_read_groups((key, rollout) for _, key, rollout in part)),
            metadata=RolloutMetadata(worker_id=worker_id, timestamp=created_at.astimezone(UTC)),
        )
        for (worker_id, _, created_at), part in groupby(rows, key=itemgetter(0))
    ]


_OF_RECORD = tuple(field.name for field in fields(Rollout) if field.name not in ("columns", "extra"))
"""Columns that are attributes of a Rollout."""


def _to_rollouts(table: pa.Table, extras: Sequence[Mapping[str, Any]]) -> list[Rollout]:
    values = zip(*(column_values(table, name) for name in _OF_RECORD), strict=True)
    arrays = {name: column_values(table, name) for name in array_columns() if table[name].null_count < table.num_rows}
    rows = zip(values, zip(*arrays.values(), strict=True), extras, strict=True)
    return [
        Rollout(
            **dict(zip(_OF_RECORD, of_row, strict=True)),
            columns={name: array for name, array in zip(arrays, of_tokens, strict=True) if array is not None},
            extra=extra,
        )
        for of_row, of_tokens, extra in rows
    ]


def _extra_values(table: pa.Table) -> list[dict[str, Any]]:
    """Return the value of `extra` for each row."""
    columns = {name: table[name].to_pylist() for name in extra_names(table.column_names)}
    return [
        {name: values[row] for name, values in columns.items() if values[row] is not None}
        for row in range(table.num_rows)
    ]


def _read_groups(rows: Iterator[tuple[str, Rollout]]) -> Iterator[RolloutGroup]:
    for _, members in groupby(rows, key=lambda row: row[1].group_id):
        keys, rollouts = zip(*members, strict=True)
        yield RolloutGroup(key=keys[0], rollouts=rollouts)


def _to_array(values: Sequence[Any], type_: pa.DataType, column: str) -> pa.Array:
    """Convert Python values, one per row, to an Arrow array of exactly this type."""
    if pa.types.is_nested(type_) and column not in REFERENCES:
        values = _to_builtins(values)
    elif pa.types.is_string(type_):
        check_size(sum(map(len, filter(None, values))), column, "bytes")
    try:
        array = pa.array(values, type_)
    except pa.ArrowCapacityError as error:
        raise TooLargeError(f"{column}: {error}") from error
    if isinstance(array, pa.ChunkedArray):  # a character may take up to four bytes
        raise TooLargeError(f"{column} holds more than {MAX_ELEMENTS} bytes")
    return array


def _to_builtins(values: Any) -> Any:
    """Return records as dictionaries with Python numbers instead of NumPy's."""
    return msgspec.to_builtins(values, enc_hook=lambda v: v.item() if isinstance(v, np.generic) else dict(v))


def column_values(table: pa.Table, column: str) -> list[Any]:
    """Return a column of the rollouts table as the values of Rollout: arrays for tokens, records for structs.

    For steps, the table also needs the column messages, which holds their texts. Arrays are read-only views, as in
    from_table. Raises SchemaError if a record holds a value that its column does not allow.
    """
    if (array := array_columns().get(column)) is not None:
        arrays = values_of(array, table[column])
        if array.num_dimensions > 1 and not array.ragged:
            _refuse_uneven(array, arrays, table[column])
        return arrays
    values = table[column].to_pylist(maps_as_pydicts="lossy")
    if pa.types.is_float32(table[column].type):
        return [None if value is None else _shortest_decimal(value) for value in values]
    if column not in RECORDS:
        return values
    if column in REFERENCES:
        messages = table["messages"].to_pylist(maps_as_pydicts="lossy")
        values = [resolve(steps or (), column, row) for steps, row in zip(values, messages, strict=True)]
    try:
        return msgspec.convert(values, GenericAlias(list, GenericAlias(tuple, (RECORDS[column], ...)) | None))
    except msgspec.ValidationError as error:
        raise SchemaError(f"table: column {column!r}: {error}") from error


def _refuse_uneven(column: ArrayColumn, arrays: Sequence[np.ndarray | None], found: pa.ChunkedArray) -> None:
    lengths = pc.fill_null(pc.list_value_length(found), 0).to_pylist()
    if any(n and not array.size for array, n in zip(arrays, lengths, strict=True) if array is not None):
        raise SchemaError(f"table: column {column.name!r} has lists of unequal lengths in one row, or empty ones")


def record_class(column: str) -> type:
    """Return the record class of the structs of a column, for example of `messages[].tool_calls[]`."""
    return RECORDS[column.rpartition(".")[2].removesuffix("[]")]


@lru_cache(maxsize=1024)
def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal of a float32, such as 0.7; it is stored again as the same float32."""
    return float(str(np.float32(value)))


# --- References: a step's text as the index of the message with the same content -----------------------
# Each text field of REFERENCES has a field FIELD_message, an index into the row's messages; if it is set, FIELD is
# null. So an answer of 4 kB takes 4 kB instead of three times that. Records hold the texts, never the indexes. Raises
# SchemaError if an index is beyond the messages.

REFERENCES: dict[str, tuple[str, ...]] = {
    "agent_steps": ("action",),
    "environment_steps": ("observation", "action", "next_observation"),
}
"""Text fields of steps that may be stored as references, by column."""


def index_field(name: str) -> str:
    """Return the name of the field with the message index of a text field."""
    return f"{name}_message"


INDEX_FIELDS = frozenset(index_field(name) for names in REFERENCES.values() for name in names)
"""Fields that rows have and records do not."""


def message_indexes(rollouts: Iterable[Rollout]) -> list[dict[str, int]]:
    """Return, for each rollout, the index of the first message with each content."""
    indexes = []
    for rollout in rollouts:
        contents = [message.content for message in reversed(rollout.messages)]
        indexes.append(dict(zip(contents, range(len(contents) - 1, -1, -1), strict=True)))
    return indexes


def refer(rows: Iterable[Sequence[dict[str, Any]]], column: str, indexes: Iterable[Mapping[str, int]]) -> None:
    """Replace texts by references, where a message fits. rows: the steps of each rollout, as dictionaries.

    indexes: result of `message_indexes`, the same for both columns of steps.
    """
    for steps, index_of in zip(rows, indexes, strict=True):
        for step in steps:
            for name in REFERENCES[column]:
                index = index_of.get(step[name])
                if index is not None:
                    step[name], step[index_field(name)] = None, index


def resolve_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row from SQL or to_pylist with texts in its steps in place of references."""
    return {**row, **{column: resolve(row[column], column, row["messages"]) for column in REFERENCES}}


def resolve(
    steps: Iterable[Mapping[str, Any]], column: str, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the steps of a row, as dictionaries, with texts in place of references."""
    found = []
    for step in steps:
        values = {name: value for name, value in step.items() if name not in INDEX_FIELDS}
        for name in REFERENCES[column]:
            index = step.get(index_field(name))
            if index is not None:
                values[name] = _content(messages, index, f"{column}[].{name}")
        found.append(values)
    return found


def _content(messages: Sequence[Mapping[str, Any]], index: int, path: str) -> str:
    if not 0 <= index < len(messages):
        raise SchemaError(f"table: {index_field(path)} is {index}, its row has {len(messages)} messages")
    return messages[index]["content"]


# --- Tables between processes --------------------------------------------------------------------------


def table_to_bytes(table: pa.Table) -> bytes:
    """Return a table, with the metadata of its schema, as bytes for another process: an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def table_from_bytes(data: bytes) -> pa.Table:
    """Return the table of `table_to_bytes`."""
    return pa.ipc.open_stream(data).read_all()
