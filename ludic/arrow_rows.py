"""Read the rows of Arrow tables that others made: Parquet files, tables of Polars and pandas, datasets.

Arrow gives all structs of a column the same fields: one that a row lacks is null there. In a struct null is therefore
absent. JSON, as text or in a column of Arrow's type for it, keeps its nulls, as lists and maps do.
"""

import json
from typing import Any, Literal

import pyarrow as pa

from ludic.errors import ConfigError


def table_rows(
    table: pa.Table | pa.RecordBatch, *, maps_as_pydicts: Literal["lossy", "strict"] | None = None
) -> list[dict[str, Any]]:
    """Return each row with all columns, null or not, and structs without the fields that are null.

    maps_as_pydicts: as in pyarrow's to_pylist. Raises ConfigError if two columns have one name.
    """
    names = table.schema.names
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the table has two columns {twice!r}; give each column a name of its own")
    nested = [field for field in table.schema if pa.types.is_nested(field.type) or _is_json(field.type)]
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts=maps_as_pydicts)
    for row in rows if nested else ():
        for field in nested:
            row[field.name] = _cleaned(row[field.name], field.type)
    return rows


def _cleaned(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(type_):
        return {field.name: _cleaned(value[field.name], field.type) for field in type_ if value[field.name] is not None}
    if pa.types.is_map(type_):
        pairs = value.items() if isinstance(value, dict) else value
        return type(value)((key, _cleaned(each, type_.item_type)) for key, each in pairs)
    if pa.types.is_nested(type_) and isinstance(value, list):
        return [_cleaned(each, type_.value_type) for each in value]
    return json.loads(value) if _is_json(type_) else value


def _is_json(type_: pa.DataType) -> bool:
    return isinstance(type_, pa.JsonType)
