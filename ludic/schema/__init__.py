"""What a table looks like, whether a batch may become rows, and the way from records to Arrow and back."""

from ludic.schema.conversion import column_values, from_table, to_table
from ludic.schema.tables import (
    SCALAR_COLUMNS,
    SCHEMA_VERSION,
    TOKEN_COLUMNS,
    Column,
    TableSchema,
    arrow_schema,
    check_schema,
    conform,
    load_table,
)
from ludic.schema.validation import Problem, find_problems, validate

__all__ = [
    "SCALAR_COLUMNS",
    "SCHEMA_VERSION",
    "TOKEN_COLUMNS",
    "Column",
    "Problem",
    "TableSchema",
    "arrow_schema",
    "check_schema",
    "column_values",
    "conform",
    "find_problems",
    "from_table",
    "load_table",
    "to_table",
    "validate",
]
