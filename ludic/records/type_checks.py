"""Find values of rollouts that do not fit the Arrow schema: wrong types, nulls, shapes, lengths and ranges.

Arrow itself would convert some of them: it stores True as 1, and 1e39 as an infinite float. Pure: no I/O. Each column
is checked as a whole first, and value by value only if that check fails.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from math import isfinite
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from ludic.records.columns import Columns, array_columns
from ludic.records.conversion import INDEX_FIELDS, record_class
from ludic.records.rollout import Rollout
from ludic.records.tables import NO_COLUMNS, arrow_schema, rollouts_schema

Misfit = tuple[str, str]
"""Column as in docs/schemas.md, and a text with the found and wanted values."""
RowProblem = tuple[int, str, str]
"""Row, and its Misfit."""


def find_misfits(rollouts: Sequence[Rollout], extra_columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[RowProblem]:
    """Yield wrong types, nulls, shapes, lengths and ranges, by column. extra_columns: type by name, as in run.json."""
    schema = arrow_schema("rollouts")
    for name in (field.name for field in fields(Rollout) if field.name not in ("columns", "extra")):
        yield from _column_misfits(list(map(attrgetter(name), rollouts)), schema.field(name))
    yield from _array_misfits(rollouts)
    yield from _extra_misfits(rollouts, extra_columns)


def _extra_misfits(rollouts: Sequence[Rollout], extra_columns: Mapping[str, str]) -> Iterator[RowProblem]:
    declared = ", ".join(extra_columns) or "none"
    extras: list[Mapping[str, Any]] = [each.extra if isinstance(each.extra, Mapping) else {} for each in rollouts]
    for row, rollout in enumerate(rollouts):
        if rollout.extra is not extras[row]:
            yield row, "extra", f"is {shown(rollout.extra)}, wanted a mapping"
        for name in extras[row].keys() - extra_columns.keys() if extras[row] else ():
            yield (
                row,
                str(name),
                f"is not a column of this run, whose extra_columns are {declared}; declare it in a new run",
            )
    schema = rollouts_schema(extra_columns)
    for name in extra_columns:
        yield from _column_misfits([extra.get(name) for extra in extras], schema.field(name))


def _array_misfits(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    """Yield arrays with a wrong type, number of dimensions or length."""
    catalogue, arrays = array_columns(), list[Columns]()
    for row, rollout in enumerate(rollouts):
        is_mapping = isinstance(rollout.columns, Mapping)
        arrays.append(rollout.columns if is_mapping else {})
        if not is_mapping:
            yield row, "columns", f"is {shown(rollout.columns)}, wanted a mapping of arrays by name"
        for name in arrays[row].keys() - catalogue.keys():
            yield row, str(name), f"is not an array of a row, wanted one of {', '.join(catalogue)}"
    prompts, responses = ([_length(each.get(name)) for each in arrays] for name in ("prompt_tokens", "response_tokens"))
    for column in catalogue.values():
        values = [each.get(column.name) for each in arrays]
        if column.fit_all(values, prompts, responses):
            continue
        for row, (each, prompt, response) in enumerate(zip(values, prompts, responses, strict=True)):
            reason = column.misfit(each)
            if reason is None and prompt is not None and response is not None:
                reason = column.wrong_length(each, prompt, response)
            if reason is not None:
                yield row, column.name, reason


def _length(tokens: Any) -> int | None:
    return len(tokens) if isinstance(tokens, np.ndarray) and tokens.ndim else None


def _column_misfits(values: Sequence[Any], field: pa.Field) -> Iterator[RowProblem]:
    if _fit(values, field, field.name):
        return
    found = [_misfits(value, field, field.name) for value in values]
    yield from ((row, *misfit) for row, misfits in enumerate(found) for misfit in misfits)


def _fit(values: Sequence[Any], field: pa.Field, path: str) -> bool:
    """Return whether all values of a column, or of a nested field, fit; may be False for rare types that fit, too."""
    if field.nullable:
        values = [value for value in values if value is not None]
    types, type_ = set(map(type, values)), field.type
    if not types <= set(_python_types(type_, path)):
        return False
    if not types or pa.types.is_boolean(type_):
        return True
    if pa.types.is_list(type_):
        return _fit(list(chain.from_iterable(values)), type_.value_field, f"{path}[]")
    if pa.types.is_map(type_):
        items = [item for value in values for item in value.values()]
        return _fit(list(chain.from_iterable(values)), type_.key_field, path) and _fit(items, type_.item_field, path)
    if pa.types.is_struct(type_):
        return all(
            _fit(list(map(attrgetter(each.name), values)), each, f"{path}.{each.name}")
            for each in type_
            if each.name not in INDEX_FIELDS
        )
    if pa.types.is_string(type_):  # isascii is a stored flag of each string, so most strings are not scanned
        return all(map(str.isascii, values)) or all(map(_is_utf8, values))
    lowest, highest, _ = _bounds(type_)
    return lowest <= min(values) and max(values) <= highest and all(map(isfinite, values))


def _misfits(value: Any, field: pa.Field, path: str) -> Iterator[Misfit]:
    """Yield the misfits in one value of a column, or of a nested field."""
    type_, wanted = field.type, _python_types(field.type, path)
    is_of_type = isinstance(value, wanted) and (bool in wanted or not isinstance(value, bool))
    if value is None and field.nullable:
        return
    if not is_of_type:
        yield path, f"is {shown(value)}, wanted {wanted[0].__name__}"
    elif pa.types.is_list(type_):
        for element in value:
            yield from _misfits(element, type_.value_field, f"{path}[]")
    elif pa.types.is_map(type_):
        for key, item in value.items():
            yield from _misfits(key, type_.key_field, path)
            yield from _misfits(item, type_.item_field, path)
    elif pa.types.is_struct(type_):
        for each in (each for each in type_ if each.name not in INDEX_FIELDS):
            yield from _misfits(getattr(value, each.name), each, f"{path}.{each.name}")
    elif pa.types.is_string(type_):
        if not _is_utf8(value):
            yield (
                path,
                f"is {shown(value)}, which holds half a surrogate pair; wanted text that can be encoded as UTF-8",
            )
    elif not pa.types.is_boolean(type_):
        lowest, highest, wanted_number = _bounds(type_)
        # NaN compares as false. float() of a NumPy scalar: comparing the scalar would round `highest` to inf.
        if not lowest <= (float(value) if isinstance(value, np.floating) else value) <= highest:
            yield path, f"is {value}, wanted {wanted_number}"


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
        return Mapping, dict
    return (record_class(path),)


def _bounds(type_: pa.DataType) -> tuple[float, float, str]:
    """Return the lowest and the highest number of a type, and the type's name for messages."""
    if pa.types.is_integer(type_):
        highest = 2 ** (type_.bit_width - 1) - 1
        return -highest - 1, highest, str(type_)
    largest = float(np.finfo(type_.to_pandas_dtype()).max)
    return -largest, largest, f"a finite {type_}"


def shown(value: Any) -> str:
    """Return a value for a message, as one line of at most 60 characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
