"""Create the views of ludic/sql/views/ for each root, and views over all roots for the user.

Root number N has the schema root_N, where views of this root refer to each other by name, and the schema empty_N, with
empty tables that define the columns while there are no files. The views of schema main combine all roots and add a
column with the root. Raises QueryError if DuckDB can't name a folder.
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from string import Template
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import duckdb
import pyarrow as pa
from duckdb.func import FunctionNullHandling, PythonUDFType
from fsspec import AbstractFileSystem

from ludic.code.kept import read_kept_text
from ludic.code.kinds import read_packaged
from ludic.errors import QueryError
from ludic.schema import arrow_schema, rollouts_schema
from ludic.sql.library import quote, quote_list
from ludic.sql.snapshot import ARGUMENTS, ListReader, Snapshot, segment_schema
from ludic.store import Root
from ludic.store.catalogue import ROWS, Records, Row, Table
from ludic.store.files import Folder
from ludic.store.records import AttemptId, Count, Time

_CODE_RECORDS = (
    "struct(role varchar, name varchar, sha256 varchar, path varchar, package varchar, imports map(varchar, varchar))[]"
)
"""DuckDB type of the code records of attempts and workers' lives: ludic.code.kept.CodeRecord."""
_FIELDS = "map(varchar, struct(name varchar, type varchar, default_value varchar))"
"""DuckDB type of the fields by name that read_parquet takes as `schema`."""
_WITH_SQL = (
    *("rollouts", "evals", "metrics", "reference", "policies", "attempts", "attempt_chain", "workers", "code"),
    *("all_batches", "batches", "requests", "request_episodes", "bias_by_length", "bias_by_order"),
    *("all_token_stats", "token_stats", "trained_tokens", "mismatch", "all_scores", "scores", "all_labels", "labels"),
    *("trajectory_rows", "trajectories", "groups", "steps", "evaluations", "eval_episodes"),
    *("inspect_samples", "inspect_evals", "quarantine", "expirations", "compactions", "gone"),
)
"""Views of ludic/sql/views/ in order of their dependencies."""
_ROWS = {row.kind: row for row in ROWS}
_STORED = {row.view: row for row in ROWS if row.view is not None}
"""The row whose files a view shows, by view."""
_VIEWS = (*(view for view in _STORED if view not in _WITH_SQL), *_WITH_SQL)
"""All views; those without SQL of their own are the stored rows as they are."""
ROOT_COLUMN = "root"
"""Column of views and scans: the URL of a row's root, as the user gave it."""
# The ledger has a column `root`: the location of a rollout that is not in the ledger's own root.
_ROOT_COLUMNS = {"batches": "ledger_root", "all_batches": "ledger_root"}


def create_views(
    con: duckdb.DuckDBPyConnection, roots: Sequence[Root], snapshots: Sequence[Snapshot], without: Iterable[str]
) -> list[str]:
    """Create the views of roots, each root's in a schema of its own; returns DuckDB's folder or URL of each root.

    snapshots: one of each root. without: names, below each root, of files to leave out.
    """
    # DuckDB binds a view, and all views below it, when it creates it. Until all views are there, an empty table stands
    # for each, so that each view is bound twice, and not with every other.
    urls = [_create_schemas(con, root, number, snapshots[number]) for number, root in enumerate(roots)]
    queries = [_create_stand_ins(con, root, number, urls[number], without) for number, root in enumerate(roots)]
    _join_views(con, roots)
    for number, query_of in enumerate(queries):
        _replace_stand_ins(con, number, query_of)
    return urls


def _create_schemas(con: duckdb.DuckDBPyConnection, root: Root, number: int, snapshot: Snapshot) -> str:
    """Create what the views of a root need; returns DuckDB's folder or URL of the root."""
    url = _duckdb_url(root, number)
    if not root.is_local:
        con.register_filesystem(RangedFileSystem(root.fs, _protocol(number)))
    _create_functions(con, root, number, url, snapshot)
    con.execute(f"create schema empty_{number}")
    con.execute(f"create schema root_{number}")
    return url


def _create_stand_ins(
    con: duckdb.DuckDBPyConnection, root: Root, number: int, url: str, without: Iterable[str]
) -> dict[str, str]:
    """Create an empty table with the columns of each view, in order; returns the queries of the views."""
    with _schema_of(con, number):
        query_of = _view_queries(con, root, number, url, without)
        for view, query in query_of.items():
            con.execute(f"create table {view} as from (\n{query}\n) limit 0")
    return query_of


def _replace_stand_ins(con: duckdb.DuckDBPyConnection, number: int, query_of: Mapping[str, str]) -> None:
    """Create the views of a root, the last first, while empty tables still stand for those that they read."""
    with _schema_of(con, number):
        for view, query in reversed(list(query_of.items())):
            con.execute(f"drop table {view}")
            con.execute(f"create view {view} as\n{query}")


@contextmanager
def _schema_of(con: duckdb.DuckDBPyConnection, number: int) -> Iterator[None]:
    """Make the schema of a root current: a view looks up names in the schema that was current when it was created."""
    con.execute(f"set schema = 'root_{number}'")
    yield
    con.execute("set schema = 'main'")


def _join_views(con: duckdb.DuckDBPyConnection, roots: Sequence[Root]) -> None:
    """Create, in schema main, the views over all roots, and the table `roots`."""
    names = [quote(root.url) for root in roots]
    for view in _VIEWS:
        column = _ROOT_COLUMNS.get(view, ROOT_COLUMN)
        parts = [f"select *, {name} as {column} from root_{number}.{view}" for number, name in enumerate(names)]  # noqa: S608
        con.execute(f"create view {view} as\n" + "\nunion all by name\n".join(parts))
    con.execute("create table roots (root varchar, run_id varchar, model varchar)")
    con.executemany("insert into roots values (?, ?, ?)", [(root.url, root.run_id, root.run.model) for root in roots])


def _create_functions(con: duckdb.DuckDBPyConnection, root: Root, number: int, url: str, snapshot: Snapshot) -> None:
    """Create the functions that views call: the files to read, at bind time; lists and texts of code, at run time."""

    def segments_of(folder: Folder) -> list[str]:
        return [_escape_glob(str(path)) for path in snapshot.stored(folder).segments]

    def compacted_of(folder: Folder) -> list[str]:
        return [_escape_glob(f"{url}/{file.name}") for file in snapshot.stored(folder).compacted]

    def files_of(kind: str) -> list[str]:
        if not snapshot.has_begun:
            return []  # a view's creation needs its columns only
        if not root.is_local:  # a name alone would cost a request for its size
            return [f"{_escape_glob(url)}/{_ROWS[kind].glob}"]
        # DuckDB's own listing stops at a name with a backslash, and follows links that lead out of the root.
        return [_escape_glob(f"{url}/{name}") for name in _ROWS[kind].names(root)]

    def text_of_code(sha256: str | None, path: str | None) -> str | None:
        return read_kept_text(root, sha256, path)

    for function in (segments_of, compacted_of, files_of):
        name = f"{function.__name__}_{number}"
        con.create_function(name, function, ["VARCHAR"], "VARCHAR[]", side_effects=False)
    con.create_function(
        f"text_of_code_{number}",
        text_of_code,
        ["VARCHAR", "VARCHAR"],
        "VARCHAR",
        null_handling=FunctionNullHandling.SPECIAL,
        side_effects=False,
    )
    reader, schema = ListReader(root), rollouts_schema(root.run.extra_columns)
    segments = segment_schema(root)
    address_types = tuple(duckdb_type(segments.field(name).type) for name in ARGUMENTS)
    for column in filter(_is_list, schema):
        con.create_function(
            f"read_{column.name}_{number}",
            partial(reader.read, column.name),
            list(address_types),
            duckdb_type(column.type),
            type=PythonUDFType.ARROW,
            null_handling=FunctionNullHandling.SPECIAL,
            side_effects=False,
        )


def _view_queries(
    con: duckdb.DuckDBPyConnection, root: Root, number: int, url: str, without: Iterable[str]
) -> dict[str, str]:
    """Return the SQL of each view, in order of their dependencies."""
    empty = f"empty_{number}"
    values = {
        "number": str(number),
        "empty": empty,
        "without": quote_list(f"{url}/{name}" for name in without),
        "records_type": quote(_CODE_RECORDS),
        "records": f"null::{_CODE_RECORDS}",
        "columns_by_address": _columns_by_address(root, number),
        "segment_schema": _create_empty_table(con, number, "segments", segment_schema(root))["schema"],
    }
    rollouts = _create_empty_table(con, number, "rollouts", rollouts_schema(root.run.extra_columns))
    queries = {}
    for view in _VIEWS:
        own = {**values, **rollouts, "folder": view}
        if view in _STORED:
            own |= _stored_rows(con, number, _STORED[view], values)
        text = read_packaged("views", "rollouts" if view == "evals" else view) if view in _WITH_SQL else "from $stored"
        queries[view] = Template(text).safe_substitute(own)
    return queries


def _stored_rows(
    con: duckdb.DuckDBPyConnection, number: int, row: Row[Any], values: Mapping[str, str]
) -> dict[str, str]:
    """Return SQL of the rows in a row's files: `stored`, a table; `columns`, their names; `types`, of records."""
    if isinstance(row, Table):
        made = _create_empty_table(con, number, row.kind, arrow_schema(row.table))
        read, how = "read_parquet", f"schema = {made['schema']}"
    else:
        assert isinstance(row, Records), f"{row.kind} has no rows"
        made = _create_empty_table(con, number, row.kind, _schema_of_record(row))
        read, how = "read_json", f"columns = {made['types']}"
    options = f"{how}, filename = true, hive_partitioning = false, allow_empty = true"
    files = f"{read}(files_of_{number}({quote(row.kind)}), {options})"
    without = f"where not list_contains({values['without']}, filename)"
    stored = f"from {values['empty']}.{row.kind} union all by name from {files}"
    return made | {"stored": f"(select {made['columns']} from ({stored}) {without})"}  # noqa: S608


def _schema_of_record(row: Records[Any, Any]) -> pa.Schema:
    """Return the columns of a view of records; what is neither a number, a text nor a time is JSON text."""
    hints = get_type_hints(row.record, include_extras=True)
    return pa.schema(
        [(each.name, _type_of(hints[each.name])) for each in fields(row.record) if each.name not in row.hidden]
    )


def _type_of(hint: Any) -> pa.DataType:
    (hint,) = (
        [each for each in get_args(hint) if each is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    )
    types = {AttemptId: pa.int32(), Time: pa.timestamp("us", "UTC"), Count: pa.int64(), int: pa.int64()}
    return types.get(hint, pa.string())


def _is_list(column: pa.Field) -> bool:
    return pa.types.is_nested(column.type)


def _create_empty_table(con: duckdb.DuckDBPyConnection, number: int, table: str, schema: pa.Schema) -> dict[str, str]:
    """Create an empty table, which gives a view its columns while there are no files; returns SQL of the columns.

    With `schema`, read_parquet fills columns that older files lack, without opening every file. It calls a function,
    since DuckDB takes as long to read a literal of all columns as to bind the rest of the view.
    """
    con.execute(f"create table empty_{number}.{table} ({columns_sql(schema)}, filename varchar)")
    columns = {column.name: duckdb_type(column.type) for column in schema}
    types = [f"{quote(name)}: {quote(type_)}" for name, type_ in columns.items()]
    fields = {name: {"name": name, "type": type_, "default_value": None} for name, type_ in columns.items()}
    function = f"schema_of_{table}_{number}"
    con.create_function(function, lambda: fields, [], _FIELDS, side_effects=False)
    return {
        "columns": ", ".join(f'"{name}"' for name in columns),
        "types": f"{{{', '.join(types)}}}",
        "schema": f"{function}()",
    }


def _columns_by_address(root: Root, number: int) -> str:
    """Return the SQL of the rollouts' columns over segments: scalars by name, lists by the address of their row."""
    address = ", ".join(f'"{name}"' for name in ARGUMENTS)
    return ", ".join(
        f'read_{column.name}_{number}({address}) as "{column.name}"' if _is_list(column) else f'"{column.name}"'
        for column in rollouts_schema(root.run.extra_columns)
    )


def _duckdb_url(root: Root, number: int) -> str:
    """Return the path of a local root, which DuckDB reads itself, else a URL of the registered filesystem."""
    if not root.is_local:
        return f"{_protocol(number)}://{root.path}"
    if "\\" in root.path:
        raise QueryError(f"{root.path}: DuckDB takes a backslash for a separator; move the run to a folder without one")
    return root.path


def _protocol(number: int) -> str:
    """Return the name of a root's filesystem in DuckDB."""
    return f"ludic{number}"


def _escape_glob(path: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", path)


# --- DuckDB's names of types ---------------------------------------------------------------------------
# DuckDB names them itself when it reads an Arrow table, but imports pandas for that, in a third of a second. Names of
# columns and fields are quoted, not escaped: they are of ludic's schemas.

_TYPES = {
    pa.bool_(): "BOOLEAN",
    pa.int16(): "SMALLINT",
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
    return _TYPES[type_]


def columns_sql(fields: Iterable[pa.Field]) -> str:
    """Return names and types of columns, as CREATE TABLE takes them."""
    return ", ".join(f'"{field.name}" {duckdb_type(field.type)}' for field in fields)


# --- Files of any fsspec filesystem --------------------------------------------------------------------
# DuckDB calls seek and read of one Python file object from several threads. If another thread seeks in between, a query
# returns wrong rows or none (DuckDB 2.0, 1 query of 50 on memory://). Here each thread has its own position, and a read
# is one ranged request. Read-only; passes on the filesystem's errors.

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class RangedFileSystem(AbstractFileSystem):
    """Serves the files of another filesystem as PROTOCOL://PATH, for DuckDB's register_filesystem."""

    cachable = False

    def __init__(self, fs: AbstractFileSystem, protocol: str = "ludic") -> None:
        """Wrap `fs`. protocol: must be unique in a connection, and without punctuation."""
        super().__init__()
        self._fs, self.protocol = fs, protocol
        self._sizes: dict[str, int] = {}

    def glob(self, path: str, **_: Any) -> list[str]:
        """List the paths that match. The listing includes sizes, which saves a request for each file."""
        found = self._fs.glob(self._path(path), detail=True)
        self._sizes |= {name: info["size"] for name, info in found.items()}
        return sorted(found)

    def open(self, path: str, mode: str = "rb", **_: Any) -> "RangedFile":
        assert mode == "rb", f"{path} is only read"
        return RangedFile(self._fs, self._path(path), self.size(path))

    def size(self, path: str) -> int:
        path = self._path(path)
        if path not in self._sizes:
            self._sizes[path] = self._fs.size(path)
        return self._sizes[path]

    def modified(self, path: str) -> datetime:
        """Return a constant: files of a root never change, so DuckDB's caches of them stay valid."""
        return _NEVER

    def exists(self, path: str, **_: Any) -> bool:
        return self._fs.exists(self._path(path))

    def _path(self, url: str) -> str:
        return url.removeprefix(f"{self.protocol}://").rstrip("/")


class RangedFile:
    """A file that threads share. A read starts at this thread's last seek, else at the end of the last read."""

    def __init__(self, fs: AbstractFileSystem, path: str, size: int) -> None:
        self._fs, self._path, self._size = fs, path, size
        self._position = 0
        self._own = threading.local()

    def seek(self, position: int) -> int:
        self._position = self._own.position = position
        return position

    def tell(self) -> int:
        return self._own.__dict__.get("position", self._position)

    def read(self, num_bytes: int) -> bytes:
        start = self._own.__dict__.pop("position", self._position)
        self._position = end = min(start + num_bytes, self._size)
        return self._fs.cat_file(self._path, start=start, end=end) if start < end else b""

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: no file is open between reads."""
