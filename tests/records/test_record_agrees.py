"""schemas/rollouts.v1.json and the record Rollout describe the same row."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pytest

from ludic.records.columns import array_columns
from ludic.records.conversion import INDEX_FIELDS, RECORDS
from ludic.records.rollout import Rollout
from ludic.records.tables import arrow_schema

STAMPS = {"run_id", "worker_id", "sequence", "created_at", "group_key"}
"""Columns that the store adds to a Rollout."""
ARRAYS = array_columns().keys()
"""Columns that are in Rollout.columns."""


def kind_of(type_: pa.DataType, name: str) -> Any:
    """The Python type that holds values of an Arrow type."""
    if pa.types.is_list(type_):
        return Sequence[kind_of(type_.value_type, name)]
    if pa.types.is_map(type_):
        return Mapping[str, kind_of(type_.item_type, name)]
    if pa.types.is_struct(type_):
        return RECORDS[name]
    if pa.types.is_integer(type_):
        return int
    if pa.types.is_floating(type_):
        return float
    return {pa.string(): str, pa.bool_(): bool}[type_]


def described(hint: Any) -> tuple[Any, bool]:
    """The kind of a field's type, and whether it may be None; a literal text is a text, a tuple a sequence."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = {str if get_origin(part) is Literal else part for part in parts}
    (kind,) = kinds - {NoneType} if kinds - {NoneType} else {NoneType}
    if get_origin(kind) is tuple:
        kind = Sequence[get_args(kind)[0]]
    return kind, NoneType in kinds or None in get_args(hint)


def hints_of(record: type) -> dict[str, Any]:
    """The types of a record's fields and properties."""
    properties = {name: value.fget for name, value in vars(record).items() if isinstance(value, property)}
    return get_type_hints(record) | {name: get_type_hints(getter)["return"] for name, getter in properties.items()}


ROWS = [(Rollout, [field for field in arrow_schema("rollouts") if field.name not in STAMPS | ARRAYS])]
for _name, _record in RECORDS.items():
    _list = arrow_schema("rollouts").field(_name if _name != "tool_calls" else "messages").type
    if _name == "tool_calls":
        _list = _list.value_type.field("tool_calls").type
    ROWS.append((_record, [field for field in _list.value_type if field.name not in INDEX_FIELDS]))


@pytest.mark.parametrize(("record", "columns"), ROWS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_column_has_a_field_of_its_kind_and_each_field_a_column(record: type, columns: list[pa.Field]):
    hints = hints_of(record)
    assert {column.name: (kind_of(column.type, column.name), column.nullable) for column in columns} == {
        column.name: described(hints[column.name]) for column in columns
    }
    assert {field.name for field in fields(record)} - {"extra", "columns"} <= {column.name for column in columns}
