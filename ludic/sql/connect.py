"""A DuckDB connection over the root of a run.

Reads the root, and keeps scalars of many small files on this machine (ludic.sql.snapshot). What `rollouts` and
`evals` hold is looked up once; the other views list their files anew at each query. Raises MissingRootError where
there is no run, QueryError for a folder that DuckDB can't name. A broken file of a worker is left out with a
warning; any other broken file fails the queries that meet it, with DuckDB's error, unless it is left out by name.
"""

import re
from collections.abc import Iterable
from functools import partial
from string import Template
from weakref import WeakKeyDictionary

import duckdb
import pyarrow as pa
from duckdb.func import FunctionNullHandling, PythonUDFType

from ludic.errors import QueryError
from ludic.schema import arrow_schema, rollouts_schema
from ludic.sql.filesystem import RangedFileSystem
from ludic.sql.library import read_packaged
from ludic.sql.lists import ARGUMENTS, ListReader
from ludic.sql.scalars import segment_schema
from ludic.sql.snapshot import Snapshot
from ludic.store import Root
from ludic.store.files import Folder

_JSON_TABLES = {
    "attempts": pa.schema(
        [
            ("attempt_id", pa.int32()),
            ("parent_attempt", pa.int32()),
            ("parent_step", pa.int64()),
            ("owner", pa.string()),
            ("created_at", pa.timestamp("us", "UTC")),
            ("config", pa.string()),
        ]
    ),
    "policies": pa.schema(
        [
            ("version", pa.int64()),
            ("step", pa.int64()),
            ("attempt_id", pa.int32()),
            ("parent_version", pa.int64()),
            ("created_at", pa.timestamp("us", "UTC")),
        ]
    ),
}
# In the order in which they build on each other; the table that the files of a view hold, if it reads any.
_VIEWS = {
    "rollouts": "rollouts",
    "evals": "rollouts",
    "metrics": "metrics",
    "reference": "reference",
    "policies": "policies",
    "attempts": "attempts",
    "attempt_chain": None,
    "all_batches": "batches",
    "batches": None,
    "groups": None,
    "steps": None,
    "set_aside": None,
    "expirations": None,
    "compactions": None,
    "gone": None,
}
_snapshots: WeakKeyDictionary[duckdb.DuckDBPyConnection, Snapshot] = WeakKeyDictionary()


def connect(root: str | Root, *, without: Iterable[str] = ()) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB with the views rollouts, groups, steps, evals, batches, all_batches, attempts,
    attempt_chain, policies, metrics and reference over the files of a run; ludic/sql/views/ says what each holds.

    rollouts and evals, and so groups and steps, stay as they were when a query first asked for them, until
    `refresh`. without: names below the root of Parquet files to leave out, such as those that can't be read.
    """
    root = Root.open(root) if isinstance(root, str) else root
    url, without = _duckdb_url(root), list(without)
    con = open_duckdb()
    if not root.is_local:
        con.register_filesystem(RangedFileSystem(root.fs))
    snapshot = Snapshot(root, without)
    _create_functions(con, root, url, snapshot)
    _create_views(con, root, url, without)
    # Only now: DuckDB asks which files there are when it creates a view, though it wants no more than the columns.
    snapshot.refresh()
    _snapshots[con] = snapshot
    return con


def refresh(con: duckdb.DuckDBPyConnection) -> None:
    """Let rollouts and evals of a connection show what was written since, from the next query on.

    Raises QueryError for a connection that `connect` did not make, such as a cursor of one.
    """
    if con not in _snapshots:
        raise QueryError("refresh wants a connection that ludic.connect gave, and not a cursor of one")
    _snapshots[con].refresh()


def open_duckdb() -> duckdb.DuckDBPyConnection:
    """An empty in-memory DuckDB, in UTC, that never takes a Python variable for a table."""
    con = duckdb.connect()
    con.execute("set TimeZone = 'UTC'")
    con.execute("set python_enable_replacements = false")
    # Files never change, and footers of a million rollouts take a third of the time of their advantages.
    con.execute("set parquet_metadata_cache = true")
    return con


def _create_functions(con: duckdb.DuckDBPyConnection, root: Root, url: str, snapshot: Snapshot) -> None:
    """What the view of rollouts calls: which files to read, when a query is bound, and lists of rows, when it runs."""

    def segments_of(folder: Folder) -> list[str]:
        return [_escape_glob(str(path)) for path in snapshot.stored(folder).segments]

    def compacted_of(folder: Folder) -> list[str]:
        return [_escape_glob(f"{url}/{file.name}") for file in snapshot.stored(folder).compacted]

    for function in (segments_of, compacted_of):
        con.create_function(function.__name__, function, ["VARCHAR"], "VARCHAR[]", side_effects=False)
    reader, schema = ListReader(root), rollouts_schema(root.run.extra_columns)
    address_types, types = _duckdb_types(con, segment_schema(root)), _duckdb_types(con, schema)
    for column in filter(_is_list, schema):
        con.create_function(
            f"read_{column.name}",
            partial(reader.read, column.name),
            [address_types[name] for name in ARGUMENTS],
            types[column.name],
            type=PythonUDFType.ARROW,
            null_handling=FunctionNullHandling.SPECIAL,
            side_effects=False,
        )


def _create_views(con: duckdb.DuckDBPyConnection, root: Root, url: str, without: Iterable[str]) -> None:
    con.execute("create schema empty")
    values = {
        "root": _literal(_escape_glob(url)),
        "without": _list_literal(f"{url}/{name}" for name in without),
        "columns_by_address": _columns_by_address(root),
        "segment_schema": _create_empty_table(con, "segments", segment_schema(root))["schema"],
    }
    tables = dict.fromkeys(filter(None, _VIEWS.values()))
    columns_of = {table: _create_empty_table(con, table, _schema(root, table)) for table in tables}
    for view, table in _VIEWS.items():
        text = read_packaged("views", "rollouts" if table == "rollouts" else view)
        literals = {**values, **(columns_of[table] if table else {}), "folder": view}
        con.execute(f"create view {view} as\n{Template(text).safe_substitute(literals)}")


def _is_list(column: pa.Field) -> bool:
    return pa.types.is_nested(column.type)


def _schema(root: Root, table: str) -> pa.Schema:
    """Of the rows that the files of a view hold."""
    if table == "rollouts":
        return rollouts_schema(root.run.extra_columns)
    return _JSON_TABLES[table] if table in _JSON_TABLES else arrow_schema(table)


def _duckdb_types(con: duckdb.DuckDBPyConnection, schema: pa.Schema) -> dict[str, str]:
    relation = con.from_arrow(schema.empty_table())
    return dict(zip(relation.columns, map(str, relation.types), strict=True))


def _create_empty_table(con: duckdb.DuckDBPyConnection, table: str, schema: pa.Schema) -> dict[str, str]:
    """What views say of their files' columns. Where there are no files there are no columns; empty.TABLE has them.

    `schema` makes read_parquet fill what older files lack, without opening every file to see what it has.
    """
    con.from_arrow(schema.append(pa.field("filename", pa.string())).empty_table()).create(f"empty.{table}")
    columns = _duckdb_types(con, schema)
    types = [f"{_literal(name)}: {_literal(type_)}" for name, type_ in columns.items()]
    fields = [
        f"{_literal(name)}: {{name: {_literal(name)}, type: {_literal(type_)}, default_value: null}}"
        for name, type_ in columns.items()
    ]
    return {
        "columns": ", ".join(f'"{name}"' for name in columns),
        "types": f"{{{', '.join(types)}}}",
        "schema": f"map {{{', '.join(fields)}}}",
    }


def _columns_by_address(root: Root) -> str:
    """The columns of rollouts as the view takes them from segments: lists are read by the address of their row."""
    address = ", ".join(f'"{name}"' for name in ARGUMENTS)
    return ", ".join(
        f'read_{column.name}({address}) as "{column.name}"' if _is_list(column) else f'"{column.name}"'
        for column in rollouts_schema(root.run.extra_columns)
    )


def _duckdb_url(root: Root) -> str:
    """A path for local folders, which DuckDB reads itself, else a URL of the registered filesystem."""
    if not root.is_local:
        return f"{RangedFileSystem.protocol}://{root.path}"
    if "\\" in root.path:
        raise QueryError(f"{root.path}: DuckDB takes a backslash for a separator; move the run to a folder without one")
    return root.path


def _escape_glob(path: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", path)


def _list_literal(texts: Iterable[str]) -> str:
    return f"[{', '.join(map(_literal, texts))}]::varchar[]"


def _literal(text: str) -> str:
    """A SQL string. Views can't hold parameters, so what they need to know of a root is quoted."""
    return "'" + text.replace("'", "''") + "'"
