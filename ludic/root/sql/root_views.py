"""Create the views of ludic/root/sql/views/ for each root, and views over all roots for the user.

Root number N has the schema root_N, where views of this root refer to each other by name, and the schema empty_N, with
empty tables that define the columns while there are no files. The views of schema main combine all roots and add a
column with the root. Raises QueryError if DuckDB can't name a folder.
"""

import logging
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from string import Template
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import duckdb
import pyarrow as pa
from duckdb.func import FunctionNullHandling, PythonUDFType
from fsspec import AbstractFileSystem
from fsspec.utils import glob_translate

from ludic.base import folder_of_object, read_packaged
from ludic.errors import QueryError, SchemaError, one_line
from ludic.records import arrow_schema, former_names, rollouts_schema
from ludic.root.catalogue import FILE_KINDS, FileKind, Records, Table
from ludic.root.code import read_snapshot_text
from ludic.root.json_records import AttemptId, StoredCount, Time
from ludic.root.root import Root
from ludic.root.rows.files import Folder
from ludic.root.sql.library import escape_glob, quote, quote_list
from ludic.root.sql.listed_files import ARGUMENTS, ListReader, Snapshot, segment_schema

logger = logging.getLogger(__name__)

_CONCURRENT_READS = 16
_CODE_RECORDS = (
    "struct(role varchar, name varchar, sha256 varchar, path varchar, package varchar, imports map(varchar, varchar))[]"
)
"""DuckDB type of the code records of attempts and workers' lives: ludic.root.json_records.CodeRecord."""
_FIELDS = "map(varchar, struct(name varchar, type varchar, default_value varchar))"
"""DuckDB type of the fields by name that read_parquet takes as `schema`."""
_WITH_SQL = (
    *("rollouts", "evals", "metrics", "reference", "policies", "attempts", "attempt_chain", "workers", "code"),
    *("all_batches", "batches", "requests", "request_episodes", "bias_by_length", "bias_by_order"),
    *("all_token_stats", "token_stats", "trained_tokens", "mismatch", "all_scores", "scores", "all_labels", "labels"),
    *("trajectory_rows", "trajectories", "rewards_of_peers", "groups", "steps", "evaluations", "eval_episodes"),
    *("inspect_samples", "inspect_evals", "quarantine", "expirations", "compactions", "gone"),
    *("model_calls", "agent_episodes", "call_audit"),
)
"""Views of ludic/root/sql/views/ in order of their dependencies."""
_ROWS = {row.kind: row for row in FILE_KINDS}
_STORED = {row.view: row for row in FILE_KINDS if row.view is not None}
"""The row whose files a view shows, by view."""
_VIEWS = (*(view for view in _STORED if view not in _WITH_SQL), *_WITH_SQL)
"""All views; a view without its own SQL shows the stored rows unchanged."""
ROOT_COLUMN = "root"
"""Column of views and scans: the URL of a row's root, as the user gave it."""
# The ledger has a column `root`: the location of a rollout that is not in the ledger's own root.
_ROOT_COLUMNS = {"batches": "ledger_root", "all_batches": "ledger_root"}


def create_views(
    con: duckdb.DuckDBPyConnection, roots: Sequence[Root], snapshots: Sequence[Snapshot], without: Collection[str]
) -> list[str]:
    """Create the views of roots, each root's in a schema of its own; returns DuckDB's folder or URL of each root.

    snapshots: one of each root. without: names, below each root, of files to leave out.
    """
    urls = []
    sql = []
    for number, root in enumerate(roots):
        if root.is_local:
            urls.append(_local_folder(root))
        else:
            files = RangedFileSystem(root.fs, f"ludic{number}", root.path)
            con.register_filesystem(files)
            urls.append(files.url)
        _create_functions(con, root, number, urls[number], snapshots[number], without)
        con.execute(f"create macro {_url_of(number)} as {quote(root.url)}")
        sql.append(_sql_of_root(con, root, number, urls[number], without))
    _kept.fill(con, tuple(sql))
    con.executemany(
        "insert into roots values (?, ?, ?)", [(root.url, root.run_id, root.record.model) for root in roots]
    )
    return urls


@dataclass(frozen=True)
class _Sql:
    """SQL that is created for one root; it depends on the root only by the names that `connect` leaves out."""

    tables: tuple[str, ...]
    """Statements that create the empty tables."""
    views: tuple[tuple[str, str], ...]
    """Name and query of each view, in order of their dependencies."""


def _create_all(con: duckdb.DuckDBPyConnection, sql: Sequence[_Sql]) -> None:
    # DuckDB binds a view, and all views that it reads, when it creates it. An empty table replaces each view until all
    # exist, so that each is bound twice, not once for every other view.
    for number, of_root in enumerate(sql):
        con.execute(f"create schema empty_{number}")
        con.execute(f"create schema root_{number}")
        for statement in of_root.tables:
            con.execute(statement)
        with _schema_of(con, number):
            for view, query in of_root.views:
                con.execute(f"create table {view} as from (\n{query}\n) limit 0")
    _join_views(con, len(sql))
    for number, of_root in enumerate(sql):
        with _schema_of(con, number):
            for view, query in reversed(of_root.views):  # the views that it reads are still empty tables
                con.execute(f"drop table {view}")
                con.execute(f"create view {view} as\n{query}")


class _KeptViews:
    """Tables and views that this process has created before, kept in DuckDB files without rows, by their SQL.

    Copying them takes a fifth of the time, since DuckDB does not bind copies.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pid, self._numbers = os.getpid(), count()
        self._folder: Path | None = None
        self._files: dict[tuple[_Sql, ...], Path] = {}

    def fill(self, con: duckdb.DuckDBPyConnection, sql: tuple[_Sql, ...]) -> None:
        """Create all tables and views in a connection that has the functions which they call."""
        with self._lock:
            if self._pid != os.getpid():  # a forked process would lose its files with those of its parent
                self._begin()
            file = self._files.get(sql)
        if file is not None and self._copy(con, file):
            return
        _create_all(con, sql)
        with self._lock, suppress(duckdb.Error, OSError):  # such as a full disk; the next connection creates them again
            if sql not in self._files and len(self._files) < _MOST_KEPT:
                self._files[sql] = self._keep(con)

    def _copy(self, con: duckdb.DuckDBPyConnection, file: Path) -> bool:
        """Return whether it could be copied; the file may have been deleted."""
        with suppress(duckdb.Error), _attached(con, file, "(read_only)"):
            con.execute("copy from database kept to memory (schema)")
            return True
        return False

    def _keep(self, con: duckdb.DuckDBPyConnection) -> Path:
        """Return a new file with all but the macros, of which each connection has its own."""
        if self._folder is None:
            self._folder = folder_of_object("views", self)
        file = self._folder / f"{next(self._numbers)}.duckdb"
        with _attached(con, file):
            con.execute("copy from database memory to kept (schema)")
            for name, kind in con.execute(_MACROS).fetchall():
                con.execute(f'drop {kind} kept."{name}"')
        return file


@contextmanager
def _attached(con: duckdb.DuckDBPyConnection, file: Path, how: str = "") -> Iterator[None]:
    con.execute(f"attach {quote(str(file))} as kept {how}")
    try:
        yield
    finally:
        con.execute("detach kept")


_MOST_KEPT = 16
"""Files; a process that connects to more kinds of roots creates the views of the others each time."""
_MACROS = """
select distinct function_name, if(function_type = 'macro', 'macro', 'macro table')
from duckdb_functions()
where database_name = 'kept' and function_type in ('macro', 'table_macro')
"""
_kept = _KeptViews()


@contextmanager
def _schema_of(con: duckdb.DuckDBPyConnection, number: int) -> Iterator[None]:
    """Make the schema of a root current: a view looks up names in the schema that was current when it was created."""
    con.execute(f"set schema = 'root_{number}'")
    yield
    con.execute("set schema = 'main'")


def _join_views(con: duckdb.DuckDBPyConnection, num_roots: int) -> None:
    """Create, in schema main, the views over all roots, and the table `roots`, which is empty."""
    for view in _VIEWS:
        column = _ROOT_COLUMNS.get(view, ROOT_COLUMN)
        parts = [f"select *, {_url_of(number)} as {column} from root_{number}.{view}" for number in range(num_roots)]  # noqa: S608
        con.execute(f"create view {view} as\n" + "\nunion all by name\n".join(parts))
    con.execute("create table roots (root varchar, run_id varchar, model varchar)")


def _url_of(number: int) -> str:
    return f"url_of_root_{number}()"


def _create_functions(
    con: duckdb.DuckDBPyConnection, root: Root, number: int, url: str, snapshot: Snapshot, without: Collection[str]
) -> None:
    """Create the functions that views call: the files to read, at bind time; lists and texts of code, at run time."""
    sound: set[str] = set()
    """Files with a record that could be read; they never change."""
    warned: set[str] = set()
    """Problems that were logged already."""

    def segments_of(folder: Folder) -> list[str]:
        return [escape_glob(str(path)) for path in snapshot.stored(folder).segments]

    def compacted_of(folder: Folder) -> list[str]:
        return [escape_glob(f"{url}/{file.name}") for file in snapshot.stored(folder).compacted]

    def files_of(kind: str) -> list[str]:
        if not snapshot.has_begun:
            return []  # a view's creation needs its columns only
        row = _ROWS[kind]
        if not root.is_local:  # a name without its size would cost a request for it
            return [f"{url}/{row.glob}"]
        # DuckDB's own listing stops at a name with a backslash, follows links that lead out of the root, and opens
        # named pipes.
        names = [name for name in row.names(root) if name not in without]
        if isinstance(row, Records):
            problems = record_problems(root, row, [name for name in names if name not in sound])
            for problem in set(map(str, problems.values())) - warned:
                logger.warning("left out: %s", problem)
                warned.add(problem)
            sound.update(names := [name for name in names if name not in problems])
        return [escape_glob(f"{url}/{name}") for name in names]

    def text_of_code(sha256: str | None, path: str | None) -> str | None:
        return read_snapshot_text(root, sha256, path)

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
    reader, schema = ListReader(root), rollouts_schema(root.extra_columns)
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


def _sql_of_root(con: duckdb.DuckDBPyConnection, root: Root, number: int, url: str, without: Iterable[str]) -> _Sql:
    """Return the SQL of a root's tables and views; create the functions that it calls for schemas."""
    tables: list[str] = []
    empty = f"empty_{number}"
    values = {
        "number": str(number),
        "empty": empty,
        "without": quote_list(f"{url}/{name}" for name in without),
        "records_type": quote(_CODE_RECORDS),
        "records": f"null::{_CODE_RECORDS}",
        "columns_by_address": _columns_by_address(root, number),
        "rivals": read_packaged("assembly", "rivals"),
        "segment_schema": _add_empty_table(con, tables, number, "segments", segment_schema(root))["schema"],
    }
    rollouts = _add_empty_table(con, tables, number, "rollouts", rollouts_schema(root.extra_columns))
    of_compacted = rollouts["columns"].replace('"capture"', 'capture_of("capture", "metadata") as "capture"')
    values["columns_of_compacted"] = of_compacted
    queries = {}
    for view in _VIEWS:
        own = {**values, **rollouts, "folder": view}
        if view in _STORED:
            own |= _stored_rows(con, tables, number, _STORED[view], values)
        text = read_packaged("views", "rollouts" if view == "evals" else view) if view in _WITH_SQL else "from $stored"
        queries[view] = Template(text).safe_substitute(own)
    return _Sql(tuple(tables), tuple(queries.items()))


def _stored_rows(
    con: duckdb.DuckDBPyConnection, tables: list[str], number: int, row: FileKind[Any], values: Mapping[str, str]
) -> dict[str, str]:
    """Return SQL of the rows in a row's files: `stored`, a table; `columns`, their names; `types`, of records."""
    files = f"files_of_{number}({quote(row.kind)})"
    without = f"where not list_contains({values['without']}, filename)"
    if isinstance(row, Table):
        schema, former = arrow_schema(row.table), former_names(row.table)
        older = [pa.field(old, schema.field(new).type) for new, old in former.items()]
        made = _add_empty_table(con, tables, number, row.kind, pa.schema([*schema, *older]))
        made["columns"] = ", ".join(f'"{name}"' for name in schema.names)
        return made | {"stored": f"({rows_of_files(row, number, files)} {without})"}
    assert isinstance(row, Records), f"{row.kind} has no rows"
    made = _add_empty_table(con, tables, number, row.kind, _schema_of_record(row))
    read = f"read_json({files}, columns = {made['types']}, {_READ_OPTIONS})"
    stored = f"from {values['empty']}.{row.kind} union all by name from {read}"
    return made | {"stored": f"(select {made['columns']} from ({stored}) {without})"}  # noqa: S608


_READ_OPTIONS = "filename = true, hive_partitioning = false, allow_empty = true"


def rows_of_files(row: Table[Any], number: int, files: str, also: str = "") -> str:
    """Return a SELECT of the rows of a table's files of root `number`, under their present names. files: SQL of a list.

    A predicate may follow it; `filename` is the name of a row's file. also: SQL of other columns, with a comma.
    """
    names, former = arrow_schema(row.table).names, former_names(row.table)
    read_as = {new: f'coalesce("{new}", "{old}") as "{new}"' for new, old in former.items()}
    selected = ", ".join(read_as.get(name, f'"{name}"') for name in names)
    read = f"read_parquet({files}, schema = schema_of_{row.kind}_{number}(), {_READ_OPTIONS})"
    return f"select {also}{selected} from (from empty_{number}.{row.kind} union all by name from {read})"  # noqa: S608


def unreadable_records(root: Root) -> dict[str, str]:
    """Return why a file of a record can't be read, by name, for each such file of a kind that a view shows."""
    rows = [row for row in _STORED.values() if isinstance(row, Records)]
    return {name: problem for row in rows for name, problem in record_problems(root, row, row.names(root)).items()}


def record_problems(root: Root, row: Records[Any, Any], names: Sequence[str]) -> dict[str, str]:
    """Return why ludic or DuckDB can't read a record, by name, for each such file of these."""
    if root.is_local:  # a thread costs more than a read
        found = [_record_problem(root, row, name) for name in names]
    else:
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            found = list(pool.map(partial(_record_problem, root, row), names))
    return {name: problem for name, problem in zip(names, found, strict=True) if problem is not None}


def _record_problem(root: Root, row: Records[Any, Any], name: str) -> str | None:
    try:
        record = row.read(root, *row.parse(name) or ())
    except SchemaError as error:
        return str(error)
    for column in _schema_of_record(row) if record is not None else ():
        value = getattr(record, column.name)
        try:
            if value is not None and not pa.types.is_string(column.type):
                _check_fits(value, column.type)
        except (ValueError, OverflowError) as error:
            return f"{root.url}/{name}: {column.name} is {value!r}, wanted {column.type} ({one_line(error)})"
    return None


def _check_fits(value: Any, type_: pa.DataType) -> None:
    """Raise ValueError for a text that is no time, OverflowError for a number that does not fit."""
    # pa.scalar imports pandas if it is installed, which takes half a second.
    if pa.types.is_timestamp(type_):
        datetime.fromisoformat(value)
    elif pa.types.is_integer(type_) and not -(1 << type_.bit_width - 1) <= value < 1 << type_.bit_width - 1:
        raise OverflowError(f"it does not fit into {type_.bit_width} bits")


def _schema_of_record(row: Records[Any, Any]) -> pa.Schema:
    """Return the columns of a view of records; values other than numbers, texts and times become JSON text."""
    hints = get_type_hints(row.record, include_extras=True)
    return pa.schema(
        [(each.name, _type_of(hints[each.name])) for each in fields(row.record) if each.name not in row.hidden]
    )


def _type_of(hint: Any) -> pa.DataType:
    (hint,) = (
        [each for each in get_args(hint) if each is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    )
    types = {AttemptId: pa.int32(), Time: pa.timestamp("us", "UTC"), StoredCount: pa.int64(), int: pa.int64()}
    return {**types, float: pa.float64(), bool: pa.bool_()}.get(hint, pa.string())


def _is_list(column: pa.Field) -> bool:
    return pa.types.is_nested(column.type)


def _add_empty_table(
    con: duckdb.DuckDBPyConnection, tables: list[str], number: int, table: str, schema: pa.Schema
) -> dict[str, str]:
    """Add an empty table, which gives a view its columns while there are no files; returns SQL of the columns.

    With `schema`, read_parquet fills columns that older files lack, without opening every file. It calls a function,
    since DuckDB takes as long to read a literal of all columns as to bind the rest of the view.
    """
    tables.append(f"create table empty_{number}.{table} ({columns_sql(schema)}, filename varchar)")
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
        for column in rollouts_schema(root.extra_columns)
    )


def _local_folder(root: Root) -> str:
    """Return the path of a local root, whose files DuckDB reads itself. Raises QueryError for a backslash."""
    if "\\" in root.path:
        raise QueryError(f"{root.path}: DuckDB treats a backslash as a separator; move the run to a folder without one")
    return root.path


# --- DuckDB's names of types ---------------------------------------------------------------------------
# DuckDB derives them itself when it reads an Arrow table, but imports pandas for that, which takes a third of a second.
# Names of columns and fields are quoted, not escaped: they come from ludic's schemas.

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

_IN_PATTERNS = re.compile(r"[\[*?]")
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class RangedFileSystem(AbstractFileSystem):
    """Serves the files below a folder of another filesystem as URL/NAME, for DuckDB's register_filesystem."""

    cachable = False

    def __init__(self, fs: AbstractFileSystem, protocol: str, folder: str) -> None:
        """Wrap `fs`. protocol: must be unique in a connection, and without punctuation."""
        super().__init__()
        self._fs, self.protocol, self._folder = fs, protocol, folder
        self.url = f"{protocol}://{_IN_PATTERNS.sub('_', folder)}"
        """The folder's name in DuckDB, with pattern characters escaped."""
        self._sizes: dict[str, int] = {}

    def glob(self, path: str, **_: Any) -> list[str]:
        """List the URLs that match. The listing includes sizes, which saves a request for each file."""
        name = self._name(path)
        first = _IN_PATTERNS.search(name)
        if first is None:
            return [path] if self.exists(path) else []
        matches = re.compile(glob_translate(name)).match
        try:
            found = self._fs.find(f"{self._folder}/{name[: first.start()].rpartition('/')[0]}", detail=True)
        except FileNotFoundError:  # some filesystems raise it for a missing folder
            return []
        sizes = {file[len(self._folder) + 1 :]: info["size"] for file, info in found.items()}
        self._sizes |= (matching := {file: size for file, size in sizes.items() if matches(file)})
        return [f"{self.url}/{file}" for file in sorted(matching)]

    def open(self, path: str, mode: str = "rb", **_: Any) -> "RangedFile":
        assert mode == "rb", f"{path} is only read"
        return RangedFile(self._fs, f"{self._folder}/{self._name(path)}", self.size(path))

    def size(self, path: str) -> int:
        name = self._name(path)
        if name not in self._sizes:
            self._sizes[name] = self._fs.size(f"{self._folder}/{name}")
        return self._sizes[name]

    def modified(self, path: str) -> datetime:
        """Return a constant: files of a root never change, so DuckDB's caches of them stay valid."""
        return _NEVER

    def exists(self, path: str, **_: Any) -> bool:
        return self._fs.exists(f"{self._folder}/{self._name(path)}")

    def _name(self, url: str) -> str:
        """Return a file's name below the folder. Raises FileNotFoundError for any other file."""
        if not url.startswith(f"{self.url}/"):
            raise FileNotFoundError(f"{url} is not below {self.url}")
        return url[len(self.url) + 1 :].rstrip("/")


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
