"""Load the schemas of tables, validate batches, and convert records to Arrow and back."""

from ludic.extra_columns import EXTRA_TYPES, check_extra_columns, extra_names
from ludic.schema.arrays import values_of
from ludic.schema.columns import ArrayColumn, Columns, Ragged, array_columns, with_columns
from ludic.schema.conversion import column_values, from_table, resolve_row, table_from_bytes, table_to_bytes, to_table
from ludic.schema.tables import (
    NO_COLUMNS,
    SCALAR_COLUMNS,
    SCHEMA_VERSION,
    TRACEBACK,
    Column,
    TableSchema,
    arrow_schema,
    as_schema,
    check_schema,
    conform,
    load_table,
    rollouts_schema,
)
from ludic.schema.validation import Problem, find_problems, validate

__all__ = [
    "EXTRA_TYPES",
    "NO_COLUMNS",
    "SCALAR_COLUMNS",
    "SCHEMA_VERSION",
    "TRACEBACK",
    "ArrayColumn",
    "Column",
    "Columns",
    "Problem",
    "Ragged",
    "TableSchema",
    "array_columns",
    "arrow_schema",
    "as_schema",
    "check_extra_columns",
    "check_schema",
    "column_values",
    "conform",
    "extra_names",
    "find_problems",
    "from_table",
    "load_table",
    "resolve_row",
    "rollouts_schema",
    "table_from_bytes",
    "table_to_bytes",
    "to_table",
    "validate",
    "values_of",
    "with_columns",
]
