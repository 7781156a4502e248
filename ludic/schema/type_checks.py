"""Find values of rollouts that do not fit the Arrow schema: wrong types, nulls, shapes, lengths and ranges.

Pure: no I/O. Checks each column as a whole, and row by row only if that finds a misfit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from math import isfinite
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from ludic.records import Rollout
from ludic.schema.conversion import record_class
from ludic.schema.references import INDEX_FIELDS
from ludic.schema.tables import NO_COLUMNS, TOKEN_COLUMNS, arrow_schema, rollouts_schema

_RESPONSE_COLUMNS = ("response_logprobs", "token_rewards", "action_mask")

RowProblem = tuple[int, str, str]
"""Row, column as in docs/schemas.md, and a text with the found and wanted values."""


def find_misfits(rollouts: Sequence[Rollout], extra_columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[RowProblem]:
    """Yield wrong types, nulls, shapes, lengths and ranges, by column. extra_columns: type by name, as in run.json."""
    schema = arrow_schema("rollouts")
    rows = range(len(rollouts))
    for name in (field.name for field in fields(Rollout) if field.name != "extra"):
        values = list(map(attrgetter(name), rollouts))
        if name in TOKEN_COLUMNS:
            yield from _array_misfits(values, schema.field(name))
        else:
            yield from _value_misfits(values, lambda: rows, schema.field(name), name)
    for name in _RESPONSE_COLUMNS:
        yield from _wrong_lengths(rollouts, name)
    yield from _extra_misfits(rollouts, extra_columns)


def _extra_misfits(rollouts: Sequence[Rollout], extra_columns: Mapping[str, str]) -> Iterator[RowProblem]:
    declared = ", ".join(extra_columns) or "none"
    rows = []
    for row, rollout in enumerate(rollouts):
        if not isinstance(rollout.extra, dict | Mapping):
            yield row, "extra", f"is {shown(rollout.extra)}, wanted a mapping"
            continue
        rows.append(row)
        for name in rollout.extra.keys() - extra_columns.keys() if rollout.extra else ():
            yield row, str(name), f"is no column of this run, whose extra_columns are {declared}; a new run declares it"
    schema = rollouts_schema(extra_columns)
    for name in extra_columns:
        yield from _value_misfits(
            [rollouts[row].extra.get(name) for row in rows], lambda: rows, schema.field(name), name
        )


def _array_misfits(arrays: Sequence[Any], field: pa.Field) -> Iterator[RowProblem]:
    dtype = np.dtype(field.type.value_type.to_pandas_dtype())
    if set(map(type, arrays)) <= {np.ndarray} and set(map(attrgetter("dtype", "ndim"), arrays)) <= {(dtype, 1)}:
        return
    for row, array in enumerate(arrays):
        if isinstance(array, np.ndarray):
            if array.dtype != dtype or array.ndim != 1:
                yield row, field.name, f"is {array.dtype} of shape {array.shape}, wanted {dtype} of one dimension"
        elif array is not None or not field.nullable:
            yield row, field.name, f"is {type(array).__name__}, wanted a NumPy array of {dtype}"


def _wrong_lengths(rollouts: Sequence[Rollout], column: str) -> Iterator[RowProblem]:
    for row, (array, tokens) in enumerate(map(attrgetter(column, "response_tokens"), rollouts)):
        if isinstance(array, np.ndarray) and isinstance(tokens, np.ndarray) and array.size != tokens.size:
            yield row, column, f"has length {array.size}, response_tokens has {tokens.size}"


_Rows = Callable[[], Iterable[int]]
"""Returns the row of each value; called only if there is a bad value."""


def _value_misfits(values: Sequence[Any], rows: _Rows, field: pa.Field, path: str) -> Iterator[RowProblem]:
    """Yield the misfits of a column, or of a nested field. rows: the row of each value."""
    if field.nullable:
        rows, values = partial(_rows_of_values, values, rows), [value for value in values if value is not None]
    if not values:
        return
    wanted = _python_types(field.type, path)
    wrong = {found for found in set(map(type, values)) if not _is_one_of(found, wanted)}
    if wrong:
        pairs = list(zip(rows(), values, strict=True))
        for row, value in pairs:
            if type(value) in wrong:
                yield row, path, f"is {shown(value)}, wanted {wanted[0].__name__}"
        sound = [pair for pair in pairs if type(pair[1]) not in wrong]
        rows, values = lambda: [row for row, _ in sound], [value for _, value in sound]
    yield from _content_misfits(values, rows, field.type, path)


def _rows_of_values(values: Sequence[Any], rows: _Rows) -> Iterator[int]:
    """Yield the rows whose value is not null."""
    return (row for row, value in zip(rows(), values, strict=True) if value is not None)


def _content_misfits(values: Sequence[Any], rows: _Rows, type_: pa.DataType, path: str) -> Iterator[RowProblem]:
    """Yield misfits as _value_misfits does, for values of the right Python type."""
    if pa.types.is_list(type_):
        owners = partial(_owners, values, rows)
        yield from _value_misfits(list(chain.from_iterable(values)), owners, type_.value_field, f"{path}[]")
    elif pa.types.is_map(type_):
        owners = partial(_owners, values, rows)
        items = [item for value in values for item in value.values()]
        yield from _value_misfits(list(chain.from_iterable(values)), owners, type_.key_field, path)
        yield from _value_misfits(items, owners, type_.item_field, path)
    elif pa.types.is_struct(type_):
        for field in (field for field in type_ if field.name not in INDEX_FIELDS):
            yield from _value_misfits(list(map(attrgetter(field.name), values)), rows, field, f"{path}.{field.name}")
    elif pa.types.is_string(type_):
        yield from _undecodable(values, rows, path)
    elif not pa.types.is_boolean(type_):
        yield from _out_of_range(values, rows, type_, path)


def _owners(values: Sequence[Any], rows: _Rows) -> Iterator[int]:
    """Yield the row of each element of lists or maps."""
    return (row for row, value in zip(rows(), values, strict=True) for _ in value)


def _python_types(type_: pa.DataType, path: str) -> tuple[type, ...]:
    """Return the Python types that may become this Arrow type; messages name the first."""
    if pa.types.is_string(type_):
        return (str,)
    if pa.types.is_boolean(type_):
        return bool, np.bool_
    if pa.types.is_integer(type_):
        return int, np.integer
    if pa.types.is_floating(type_):
        return float, int, np.floating, np.integer
    if pa.types.is_list(type_):
        return tuple, list
    if pa.types.is_map(type_):
        return (Mapping,)
    return (record_class(path),)


def _is_one_of(found: type, wanted: tuple[type, ...]) -> bool:
    return issubclass(found, wanted) and (found is not bool or bool in wanted)


def shown(value: Any) -> str:
    """Return a value for a message, as one line of at most 60 characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _undecodable(values: Sequence[str], rows: _Rows, path: str) -> Iterator[RowProblem]:
    # isascii is a stored flag of each string, so most strings are not scanned.
    if all(map(str.isascii, values)):
        return
    for row, value in zip(rows(), values, strict=True):
        if not value.isascii() and not _is_utf8(value):
            yield row, path, f"is {shown(value)}, which holds half a surrogate pair; wanted text that UTF-8 can hold"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _out_of_range(values: Sequence[Any], rows: _Rows, type_: pa.DataType, path: str) -> Iterator[RowProblem]:
    if pa.types.is_integer(type_):
        highest = 2 ** (type_.bit_width - 1) - 1
        lowest, wanted = -highest - 1, str(type_)
    else:
        highest = float(np.finfo(type_.to_pandas_dtype()).max)
        lowest, wanted = -highest, f"a finite {type_}"
    if _are_within(values, lowest, highest):
        return
    for row, value in zip(rows(), values, strict=True):
        # NaN compares as false. float() of a NumPy scalar: comparing the scalar would round `highest` to inf.
        number = float(value) if isinstance(value, np.floating) else value
        if not lowest <= number <= highest:
            yield row, path, f"is {value}, wanted {wanted}"


def _are_within(values: Sequence[Any], lowest: float, highest: float) -> bool:
    """Whether all values are plain numbers in that range; five times as fast as checking each value."""
    types = set(map(type, values))
    if not types:
        return True
    if types == {int}:
        return lowest <= min(values) and max(values) <= highest
    if not types <= {int, float}:
        return False
    try:
        return all(map(isfinite, values)) and lowest <= min(values) and max(values) <= highest
    except OverflowError:  # an int beyond any float
        return False
