"""Convert records to Arrow and back, bit for bit and without a Python loop over tokens.

The schema drives both directions: a column is the attribute of the same name, a list of structs is a tuple of the
record in RECORDS, and a run's own columns are in `extra`. No I/O. Expects a validated batch (ludic.schema.validation).
Raises InvalidBatchError if a rollout is too large for a column, SchemaError if a table is foreign.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import UTC
from functools import lru_cache
from itertools import groupby, pairwise, starmap
from operator import attrgetter, itemgetter
from types import GenericAlias
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import InvalidBatchError, SchemaError
from ludic.extra_columns import extra_names
from ludic.records import (
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
from ludic.schema.tables import (
    MATRIX_COLUMNS,
    NO_COLUMNS,
    RAGGED_COLUMNS,
    TOKEN_COLUMNS,
    arrow_schema,
    conform,
    rollouts_schema,
)

RECORDS: dict[str, type] = {
    "agent_steps": AgentStep,
    "environment_steps": EnvironmentStep,
    "messages": Message,
    "tool_calls": ToolCall,
    "weight_versions": WeightSpan,
}
"""Record class of the structs of a column, by the column's name."""

_MAX_ELEMENTS = 2**31 - 1
"""Maximum elements of an Arrow list array and bytes of a string array, whose offsets are int32."""


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
    except _TooLargeError as error:
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
        elif name in tokens:
            offsets = _offsets(map(len, map(attrgetter(name), rollouts)), name)
            columns.append(pa.ListArray.from_arrays(offsets, tokens[name], type=type_))
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


def _to_rollouts(table: pa.Table, extras: Sequence[Mapping[str, Any]]) -> list[Rollout]:
    names = [field.name for field in fields(Rollout) if field.name != "extra"]
    columns = {name: column_values(table, name) for name in names}
    rows = zip(*(columns[name] for name in names), strict=True)
    return [Rollout(**dict(zip(names, row, strict=True)), extra=extra) for row, extra in zip(rows, extras, strict=True)]


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
    if column in TOKEN_COLUMNS:
        return _tokens_to_array(values, type_, column)
    if column in RAGGED_COLUMNS:
        return _ragged_to_array(values, type_, column)
    if column in MATRIX_COLUMNS:
        return to_matrices(values, type_, column)
    if pa.types.is_nested(type_) and column not in REFERENCES:
        values = _to_builtins(values)
    elif pa.types.is_string(type_):
        _check_size(sum(map(len, filter(None, values))), column, "bytes")
    try:
        array = pa.array(values, type_)
    except pa.ArrowCapacityError as error:
        raise _TooLargeError(f"{column}: {error}") from error
    if isinstance(array, pa.ChunkedArray):  # a character may take up to four bytes
        raise _TooLargeError(f"{column} holds more than {_MAX_ELEMENTS} bytes")
    return array


def _to_builtins(values: Any) -> Any:
    """Return records as dictionaries with Python numbers instead of NumPy's."""
    return msgspec.to_builtins(values, enc_hook=lambda v: v.item() if isinstance(v, np.generic) else dict(v))


class _TooLargeError(Exception):
    """Values do not fit in one Arrow array; the rows are then converted in smaller parts."""


def _check_size(count: int, column: str, unit: str) -> None:
    if count > _MAX_ELEMENTS:
        raise _TooLargeError(f"{column} holds {count} {unit}, at most {_MAX_ELEMENTS} fit in a row")


def _tokens_to_array(arrays: Sequence[np.ndarray | None], type_: pa.DataType, column: str) -> pa.Array:
    offsets = _offsets((0 if array is None else len(array) for array in arrays), column)
    present = [array for array in arrays if array is not None]
    return pa.ListArray.from_arrays(offsets, join_tokens(present, column), type=type_, mask=_absent(arrays))


def _ragged_to_array(rows: Sequence[Sequence[np.ndarray] | None], type_: pa.DataType, column: str) -> pa.Array:
    offsets = _offsets((0 if arrays is None else len(arrays) for arrays in rows), column)
    arrays = [array for of_row in rows if of_row is not None for array in of_row]
    inner = pa.ListArray.from_arrays(
        _offsets(map(len, arrays), column), join_tokens(arrays, column), type=type_.value_type
    )
    return pa.ListArray.from_arrays(offsets, inner, type=type_, mask=_absent(rows))


def to_matrices(arrays: Sequence[np.ndarray | None], type_: pa.DataType, column: str) -> pa.Array:
    """Return a list<list<list>> column of this type from arrays of three dimensions; None is a null."""
    present = [array for array in arrays if array is not None]
    numbers = join_tokens([array.reshape(-1) for array in present], column)
    # Each level's lists are of one length within a row.
    tokens, rows = [len(array) for array in present], [array.shape[1] for array in present]
    widths = np.repeat([array.shape[2] for array in present], np.multiply(tokens, rows).astype(np.int64))
    inner = pa.ListArray.from_arrays(_offsets(widths, column), numbers, type=type_.value_type.value_type)
    middle = pa.ListArray.from_arrays(_offsets(np.repeat(rows, tokens), column), inner, type=type_.value_type)
    offsets = _offsets((0 if array is None else len(array) for array in arrays), column)
    return pa.ListArray.from_arrays(offsets, middle, type=type_, mask=_absent(arrays))


def _absent(values: Sequence[Any]) -> pa.Array | None:
    """Return which values are None; None if none is."""
    is_absent = [value is None for value in values]
    return pa.array(is_absent, pa.bool_()) if any(is_absent) else None


def join_tokens(arrays: Sequence[np.ndarray], column: str) -> pa.Array:
    """Concatenate arrays of numbers, as they are in the innermost lists of a column."""
    type_ = arrow_schema("rollouts").field(column).type
    while pa.types.is_list(type_):
        type_ = type_.value_type
    if pa.types.is_boolean(type_):
        return pa.array(np.concatenate([np.empty(0, np.bool_), *arrays]), type_)
    # Allocate from Arrow's pool, which keeps its pages; fresh pages of the system cost ten times as much as the copy.
    dtype = np.dtype(type_.to_pandas_dtype())
    length = sum(map(len, arrays))
    buffer = pa.allocate_buffer(length * dtype.itemsize)
    if length:
        np.concatenate(arrays, out=np.frombuffer(buffer, dtype), casting="equiv")
    return pa.Array.from_buffers(type_, length, [None, buffer])


def _offsets(lengths: Iterable[int], column: str) -> pa.Array:
    """Return (rows + 1,) int32: the begin of each row's elements, and the end of the last row's."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    _check_size(int(ends[-1]), column, "elements")
    return pa.array(ends.astype(np.int32))


def column_values(table: pa.Table, column: str) -> list[Any]:
    """Return a column of the rollouts table as the values of Rollout: arrays for tokens, records for structs.

    For steps, the table also needs the column messages, which holds their texts. Arrays are read-only views, as in
    from_table. Raises SchemaError if a record holds a value that its column does not allow.
    """
    if column in TOKEN_COLUMNS:  # chunk by chunk: joining chunks would copy, and could overflow their offsets
        return [value for chunk in table[column].chunks for value in token_arrays(chunk)]
    if column in RAGGED_COLUMNS:
        ragged = (value for chunk in table[column].chunks for value in ragged_arrays(chunk))
        return [None if row is None else _split(*row) for row in ragged]
    if column in MATRIX_COLUMNS:
        matrices = [value for chunk in table[column].chunks for value in matrix_arrays(chunk)]
        if any(value is not None and value.size == 0 for value in matrices):
            raise SchemaError(f"table: column {column!r} has lists of unequal lengths in one row, or empty ones")
        return matrices
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


def token_arrays(array: pa.ListArray) -> list[np.ndarray | None]:
    """Return lists of numbers as read-only views of one array; None for a null."""
    flat = array.flatten().to_numpy(zero_copy_only=not pa.types.is_boolean(array.type.value_type))
    return [flat[part] if part else None for part in _slices(array)]


def ragged_arrays(array: pa.ListArray) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Return each row of a list<list> column as its numbers, (K,), and (n + 1,) bounds of its n lists; None for a null.

    The numbers are read-only views of one array.
    """
    inner = array.flatten()
    flat, bounds = inner.values.to_numpy(), inner.offsets.to_numpy()
    rows: list[tuple[np.ndarray, np.ndarray] | None] = []
    for part in _slices(array):
        if part is None:
            rows.append(None)
        else:
            of_row = bounds[part.start : part.stop + 1]
            rows.append((flat[of_row[0] : of_row[-1]], of_row - of_row[0]))
    return rows


def matrix_arrays(array: pa.ListArray) -> list[np.ndarray | None]:
    """Return each row of a list<list<list>> column as a read-only view, (n, rows, columns); None for a null.

    A row whose lists are empty, or not all of one length, is an array without elements.
    """
    middle = array.flatten()
    inner = middle.values
    flat, of_tokens, of_rows = inner.values.to_numpy(), middle.offsets.to_numpy(), inner.offsets.to_numpy()
    found: list[np.ndarray | None] = []
    for part in _slices(array):
        if part is None:
            found.append(None)
            continue
        tokens = of_tokens[part.start : part.stop + 1]
        rows = of_rows[tokens[0] : tokens[-1] + 1]
        heights, widths = np.diff(tokens), np.diff(rows)
        is_even = len(heights) and len(widths) and (heights == heights[0]).all() and (widths == widths[0]).all()
        shape = (len(heights), int(heights[0]), int(widths[0])) if is_even else (0, 0, 0)
        found.append(flat[rows[0] : rows[-1]].reshape(shape) if is_even else np.zeros(shape, flat.dtype))
    return found


def _split(numbers: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(numbers[start:end] for start, end in pairwise(bounds.tolist()))


def _slices(array: pa.ListArray) -> list[slice | None]:
    """Return each row's slice of array.flatten(), which skips elements hidden by nulls and slices; None for a null."""
    if array.null_count == len(array):
        return [None] * len(array)
    if not array.null_count:
        offsets = array.offsets.to_numpy()
        return list(starmap(slice, pairwise((offsets - offsets[0]).tolist())))
    lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    parts = map(slice, (ends - lengths).tolist(), ends.tolist())
    return [part if valid else None for part, valid in zip(parts, array.is_valid().to_pylist(), strict=True)]


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
