"""Load the table schemas from schemas/*.json as Arrow schemas, and check the schemas of files against them.

Reads schemas/{table}.v{major}.json, from the wheel or from the checkout. A schema may take a type from another table,
{"of": "rollouts.messages"}, or all its columns with a `set_by`, {"includes": "rollouts", "set_by": "sampler"}.
Raises SchemaError with the file, the column, the found and the wanted type.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import NewerSchemaError, SchemaError

TABLE_KEY = b"ludic.table"
VERSION_KEY = b"ludic.schema_version"

_PRIMITIVES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bool": pa.bool_(),
}

_STORED_KEYS = ("name", "type", "nullable", "doc")

NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
"""Extra columns of a run without extra columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table, or one field of a struct."""

    name: str
    type: pa.DataType
    nullable: bool
    doc: str
    children: tuple["Column", ...] = ()
    """Fields of the struct, if the column is a struct or a list of structs."""
    catalogue: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the row, which the stored schema does not have; see ludic.records.columns.ArrayColumn."""

    def to_arrow(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=self.nullable)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """Contents of schemas/{name}.v{major}.json."""

    name: str
    version: str
    """MAJOR.MINOR; a minor version adds nullable columns or renames one, anything else is a new major version."""
    doc: str
    columns: tuple[Column, ...]


Row = Mapping[str, Any]
"""One row of a table, by column; columns that are left out are null."""


@cache
def table_names() -> Sequence[str]:
    """Return the names of the tables: rollouts, which the others refer to, then by name."""
    names = {path.name.partition(".v")[0] for path in _schemas_folder().glob("*.v*.json")}
    return sorted(names, key=lambda name: (name != "rollouts", name))


@cache
def load_table(name: str) -> TableSchema:
    """Return the newest schema of a table. Raises SchemaError if ludic has no such table."""
    if name not in table_names():
        raise SchemaError(f"there is no table {name!r}; ludic has {', '.join(table_names())}")
    newest = max(_schemas_folder().glob(f"{name}.v*.json"), key=lambda path: int(path.stem.rpartition(".v")[2]))
    spec = json.loads(newest.read_text(encoding="utf-8"))
    assert spec["table"] == name, f"{newest} describes {spec['table']}"
    columns = tuple(column for each in spec["columns"] for column in _parse_entry(each))
    return TableSchema(name=name, version=spec["version"], doc=spec["doc"], columns=columns)


def _parse_entry(spec: Mapping[str, Any]) -> Sequence[Column]:
    """Return the column of an entry, or the columns that it includes from another table; those may be null."""
    if "includes" not in spec:
        return [_parse_column(spec)]
    found = [each for each in load_table(spec["includes"]).columns if each.catalogue.get("set_by") == spec["set_by"]]
    return [replace(each, nullable=True) for each in found]


@cache
def former_names(name: str) -> Mapping[str, str]:
    """Return what files of older minor versions call a column, by its name now; readers take both."""
    return {each.name: each.catalogue["formerly"] for each in load_table(name).columns if "formerly" in each.catalogue}


@cache
def shown_names(name: str) -> Mapping[str, str]:
    """Return the name in SQL of each column that is stored under another: a minor version can't rename it."""
    return {each.name: each.catalogue["called"] for each in load_table(name).columns if "called" in each.catalogue}


@cache
def names_not_in_sql() -> Mapping[str, str]:
    """Return the name that SQL has for a column, by a stored name that SQL does not have."""
    former = {old: new for table in table_names() for new, old in former_names(table).items()}
    return former | {stored: shown for table in table_names() for stored, shown in shown_names(table).items()}


@cache
def arrow_schema(name: str) -> pa.Schema:
    """Return the Arrow schema of a table, with the table's name and version as metadata.

    Elements of lists and values of maps are never null.
    """
    table = load_table(name)
    metadata = {TABLE_KEY: name.encode(), VERSION_KEY: table.version.encode()}
    return pa.schema([column.to_arrow() for column in table.columns], metadata=metadata)


def rollouts_schema(extra_columns: Mapping[str, str]) -> pa.Schema:
    """Return arrow_schema("rollouts") with a run's own columns at its end, all nullable.

    extra_columns: type by name, as in run.json, such as {"x_judge": "string", "x_spans": "list<int64>"}.
    """
    return _rollouts_schema(tuple(extra_columns.items()))


@lru_cache(maxsize=64)
def _rollouts_schema(extra_columns: tuple[tuple[str, str], ...]) -> pa.Schema:
    schema = arrow_schema("rollouts")
    for name, type_ in extra_columns:
        schema = schema.append(pa.field(name, _parse_type(type_)))
    return schema


def check_schema(file_schema: pa.Schema, name: str, where: str) -> None:
    """Raise SchemaError unless a file with this schema holds the table `name` in this major version.

    where: the file, for the message. Accepts unknown columns, which a newer minor version may have added, and missing
    nullable columns, which an older minor version did not have.
    """
    _check_metadata(file_schema.metadata or {}, name, where)
    problems = _column_problems(file_schema, name)
    if problems:
        raise SchemaError(f"{where}: {'; '.join(problems)} ({name} schema {load_table(name).version})")


def conform(table: pa.Table, name: str) -> pa.Table:
    """Return the same rows in exactly arrow_schema(name): columns in its order, without unknown columns.

    Missing nullable columns and struct fields are null; a column's former name counts. Buffers are shared if the types
    agree. Raises SchemaError if a required column is missing, a type is wrong, or a column has nulls that it may not
    have.
    """
    former = {old: new for new, old in former_names(name).items() if new not in table.column_names}
    if not former.keys().isdisjoint(table.column_names):
        table = table.rename_columns([former.get(each, each) for each in table.column_names])
    problems = _column_problems(table.schema, name)
    if problems:
        raise SchemaError(f"table: {'; '.join(problems)} ({name} schema {load_table(name).version})")
    return as_schema(table, arrow_schema(name), "table")


def as_schema(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """Return the same rows in exactly this schema: its columns in its order; columns that the table lacks are null.

    Raises SchemaError, naming `where`, if a column can't be cast, or has nulls that it may not have.
    """
    found = dict(zip(table.column_names, table.columns, strict=True))
    columns = [_as_field(found.get(field.name), field, table.num_rows, where) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def type_name(type_: pa.DataType, *, with_fields: bool = False) -> str:
    """Return a type as docs/schemas.md and errors write it, without the names of list elements.

    with_fields: spell out the fields of structs, since two types may differ in a field.
    """
    if _is_list(type_):
        return f"list<{type_name(type_.value_type, with_fields=with_fields)}>"
    if pa.types.is_map(type_):
        return f"map<{type_name(type_.key_type)}, {type_name(type_.item_type)}>"
    if pa.types.is_struct(type_):
        fields = ", ".join(f"{field.name}: {type_name(field.type, with_fields=True)}" for field in type_)
        return f"struct<{fields}>" if with_fields else "struct"
    if pa.types.is_timestamp(type_):
        return f"timestamp[{type_.unit}, {type_.tz or 'no time zone'}]"
    return str(type_)


def _schemas_folder() -> Path:
    """Return the folder of the schemas: ludic/schemas in a wheel, schemas/ at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "schemas"
    return packaged if packaged.is_dir() else package.parent / "schemas"


def _parse_column(spec: Mapping[str, Any]) -> Column:
    if isinstance(spec["type"], dict) and "of" in spec["type"]:
        other = _other_column(spec["type"]["of"])
        return replace(other, **{key: spec[key] for key in _STORED_KEYS if key != "type"})
    item = spec["type"]
    while isinstance(item, dict) and "list" in item:
        item = item["list"]
    fields = item["struct"] if isinstance(item, dict) and "struct" in item else []
    return Column(
        name=spec["name"],
        type=_parse_type(spec["type"]),
        nullable=spec["nullable"],
        doc=spec["doc"],
        children=tuple(_parse_column(field) for field in fields),
        catalogue={key: value for key, value in spec.items() if key not in _STORED_KEYS},
    )


def _other_column(path: str) -> Column:
    """Return the column TABLE.NAME, whose type and rules another column has."""
    table, _, name = path.partition(".")
    return next(each for each in load_table(table).columns if each.name == name)


def _parse_type(spec: Any) -> pa.DataType:
    match spec:
        case str() if spec in _PRIMITIVES:
            return _PRIMITIVES[spec]
        case str() if spec.startswith("list<"):  # as extra columns are written in run.json
            return _parse_type({"list": spec.removeprefix("list<").removesuffix(">")})
        case {"timestamp": unit}:
            return pa.timestamp(unit, tz="UTC")
        case {"list": element}:
            # Required elements decode 18% faster than nullable ones (pyarrow 26, float lists of 512).
            return pa.list_(pa.field("element", _parse_type(element), nullable=False))
        case {"map": [key, value]}:
            return pa.map_(
                pa.field("key", _parse_type(key), nullable=False), pa.field("value", _parse_type(value), nullable=False)
            )
        case {"struct": columns}:
            return pa.struct([_parse_column(column).to_arrow() for column in columns])
    raise SchemaError(
        f"unknown type {spec!r} in schemas/; a type is one of {', '.join(_PRIMITIVES)}, or built from them"
    )


def _check_metadata(metadata: Mapping[bytes, bytes], name: str, where: str) -> None:
    table = metadata.get(TABLE_KEY, b"").decode(errors="replace")
    version = metadata.get(VERSION_KEY, b"").decode(errors="replace")
    if not table:
        raise SchemaError(f"{where}: no ludic.table in its metadata, wanted {name}; ludic did not write this file")
    if table != name:
        raise SchemaError(f"{where}: holds the table {table}, wanted {name}")
    major, own = version.partition(".")[0], load_table(name).version
    if not major.isdecimal():
        raise SchemaError(f"{where}: its schema version is {version!r}, wanted a number such as {own}")
    own_major = int(own.partition(".")[0])
    if int(major) > own_major:
        raise NewerSchemaError(
            f"{where}: {name} schema {version} is newer than this ludic, which reads {own}; upgrade ludic"
        )
    if int(major) < own_major:
        raise SchemaError(f"{where}: {name} schema {version} is older than this ludic, which reads {own}")


@lru_cache(maxsize=256)
def _column_problems(found: pa.Schema, name: str) -> tuple[str, ...]:
    """Return the problems of a schema. Cached: a root's files share a few schemas, and one check takes 0.25 ms."""
    problems = []
    for column in arrow_schema(name):
        index = found.get_field_index(column.name)
        type_ = found.field(index).type if index >= 0 else None
        if type_ is None and not column.nullable:
            problems.append(f"column {column.name!r} is missing, wanted {type_name(column.type)}")
        elif type_ is not None and not _same_type(type_, column.type):
            found_type, wanted = (type_name(each, with_fields=True) for each in (type_, column.type))
            problems.append(f"column {column.name!r} is {found_type}, wanted {wanted}")
    return tuple(problems)


def _is_list(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_)


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether two types hold the same values; ignores offset widths, element names and nullability.

    Polars and DuckDB write large_string, large_list and nullable elements where pyarrow does not.
    """
    if _is_list(wanted):
        return _is_list(found) and _same_type(found.value_type, wanted.value_type)
    if pa.types.is_map(wanted):
        return (
            pa.types.is_map(found)
            and _same_type(found.key_type, wanted.key_type)
            and _same_type(found.item_type, wanted.item_type)
        )
    if pa.types.is_struct(wanted):
        if not pa.types.is_struct(found):
            return False
        indexes = ((found.get_field_index(field.name), field) for field in wanted)
        return all(_same_type(found.field(i).type, field.type) if i >= 0 else field.nullable for i, field in indexes)
    if pa.types.is_string(wanted):
        return pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)
    if pa.types.is_timestamp(wanted):
        return pa.types.is_timestamp(found) and found.unit == wanted.unit and found.tz is not None
    return found == wanted


def _as_field(column: pa.ChunkedArray | None, field: pa.Field, num_rows: int, where: str) -> pa.ChunkedArray:
    if column is None:
        return pa.chunked_array([pa.nulls(num_rows, field.type)])
    if not field.nullable and column.null_count:
        raise SchemaError(f"{where}: column {field.name!r} has {column.null_count} nulls, wanted none")
    if column.type == field.type:
        return column
    try:
        column = column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"{where}: column {field.name!r}: {error}") from error
    # The cast checks for nulls in struct fields, but not among the elements of lists.
    elements = column
    while pa.types.is_list(elements.type):
        elements = pc.list_flatten(elements)
        if elements.null_count:
            raise SchemaError(f"{where}: column {field.name!r} has null elements, wanted none")
    return column


SCHEMA_VERSION = load_table("rollouts").version
"""Schema version of the rollouts table, stored in run.json."""

TRACEBACK = "traceback"
_LONG = (TRACEBACK, "example_columns")
"""Columns of rollouts with kilobytes of text in a row; plans load them only if their SQL names them."""

SCALAR_COLUMNS = tuple(
    field.name for field in arrow_schema("rollouts") if not pa.types.is_nested(field.type) and field.name not in _LONG
)
"""Columns of rollouts that are not lists, structs or maps, without the long texts: all that most SQL plans need."""
