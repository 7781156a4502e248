"""DuckDB's names of the types of stored columns.

DuckDB names them itself when it reads an Arrow table, but imports pandas for that, in a third of a second. Names of
columns and fields are quoted, not escaped: they are of ludic's schemas.
"""

from collections.abc import Iterable

import pyarrow as pa

_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.timestamp("us", "UTC"): "TIMESTAMP WITH TIME ZONE",
}


def duckdb_type(type_: pa.DataType) -> str:
    """Return DuckDB's name of a type. Raises KeyError for a type that no stored column has."""
    if pa.types.is_list(type_):
        return f"{duckdb_type(type_.value_type)}[]"
    if pa.types.is_map(type_):
        return f"MAP({duckdb_type(type_.key_type)}, {duckdb_type(type_.item_type)})"
    if pa.types.is_struct(type_):
        return f"STRUCT({columns_sql(type_)})"
    return _NAMES[type_]


def columns_sql(fields: Iterable[pa.Field]) -> str:
    """Return names and types of columns, as CREATE TABLE takes them."""
    return ", ".join(f'"{field.name}" {duckdb_type(field.type)}' for field in fields)
