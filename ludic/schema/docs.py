"""Render the tables as a page of Markdown, from schemas/*.json."""

from collections.abc import Iterator

import pyarrow as pa

from ludic.schema.tables import Column, TableSchema, load_table, table_names, type_name

_INTRODUCTION = """\
# Tables

Made from `schemas/` by `python -m ludic.schema`, as `make format` does; edit those files instead.
A minor version adds nullable columns, and anything else is a new major version. Elements of
lists and values of maps are never null. Fields of structs follow their column, as `column[].field`.

A run may declare columns of its own for rollouts, `x_` and a name, in `extra_columns` of `run.json`; they come last,
any may be null, and their types are string, int64, double, bool and lists of these.
"""

_TABLE_HEAD = "| name | type | null | meaning |\n| --- | --- | --- | --- |\n"


def render() -> str:
    """Return docs/schemas.md: name, type, nullability and meaning of each column of ludic's tables."""
    return "\n".join([_INTRODUCTION, *(_render_table(load_table(name)) for name in table_names())])


def _render_table(table: TableSchema) -> str:
    head = f"## {table.name} {table.version}\n\n{table.doc}\n\n{_TABLE_HEAD}"
    return head + "".join(line for column in table.columns for line in _render_column(column, ""))


def _render_column(column: Column, prefix: str) -> Iterator[str]:
    name = prefix + column.name
    doc = column.doc.replace("|", "\\|")
    yield f"| `{name}` | `{type_name(column.type)}` | {'null' if column.nullable else ''} | {doc} |\n"
    path = f"{name}[]." if pa.types.is_list(column.type) else f"{name}."
    for child in column.children:
        yield from _render_column(child, path)
