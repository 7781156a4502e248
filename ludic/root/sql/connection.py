"""Connect DuckDB to the roots of one or several runs.

Reads the roots, and caches scalars of many small files on this machine (ludic.root.sql.listed_files). The files of
`rollouts` and `evals` are listed once; the other views list their files at each query. Raises MissingRootError if there
is no run, QueryError if the roots can't be read together or DuckDB can't name a folder. A broken file of a worker, and
on a local disk a broken record, is left out with a warning; any other broken file fails the queries that read it, with
DuckDB's error, unless it is left out by name.
"""

import atexit
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any, Protocol, Self, TypeGuard, clear_overloads
from weakref import WeakKeyDictionary

import duckdb
import pyarrow as pa

from ludic.errors import QueryError
from ludic.records import rollouts_schema
from ludic.root.root import Root
from ludic.root.sql.kept_ledger import KeptLedger
from ludic.root.sql.library import create_macros, escape_glob, quote_list
from ludic.root.sql.listed_files import Snapshot
from ludic.root.sql.root_views import create_views

# torch keeps `typing` to the end of the process, whose registry of overloads keeps the modules of their functions. So
# DuckDB's module was kept, too, and its binding printed 40 lines of "leaked instance" below the last line of a run.
atexit.register(clear_overloads)

# --- Roots to read together ----------------------------------------------------------------------------


class HasRoot(Protocol):
    """An opened run: ludic.Run, which this layer does not import."""

    root: Root


RootLike = str | PathLike[str] | Root | HasRoot
"""Folder or URL of a run, an opened Root, or a ludic.Run."""


def open_roots(roots: Iterable[RootLike | Iterable[RootLike]]) -> list[Root]:
    """Open the roots of a call, given as separate arguments or as a list. Raises QueryError for none or duplicates."""
    given: list[Any] = []
    for each in roots:
        given += each if isinstance(each, Iterable) and not isinstance(each, str) else [each]
    if not given:
        raise QueryError("there is no root to read; give the folder or URL of at least one run")
    opened = [
        root.root if _is_opened(root) else root if isinstance(root, Root) else Root.open(str(root)) for root in given
    ]
    _refuse_doubles(opened)
    _refuse_different_columns(opened)
    return opened


def _is_opened(run: Any) -> TypeGuard[HasRoot]:
    return isinstance(getattr(run, "root", None), Root)  # a Path has a root, too: the text "/"


def _refuse_doubles(roots: Sequence[Root]) -> None:
    seen: dict[str, str] = {}
    for root in roots:
        url = root.fs.unstrip_protocol(root.path)
        if url in seen:
            raise QueryError(f"{root.url} is the same folder as {seen[url]}; name each root once")
        seen[url] = root.url


def _refuse_different_columns(roots: Sequence[Root]) -> None:
    """Raise QueryError if two runs have extra columns of the same name whose types have no common type."""
    first: dict[str, tuple[pa.Field, str]] = {}
    for root in roots:
        for column in rollouts_schema(root.extra_columns):
            known, url = first.setdefault(column.name, (column, root.url))
            try:
                pa.unify_schemas([pa.schema([known]), pa.schema([column])], promote_options="permissive")
            except pa.ArrowException as error:
                raise QueryError(
                    f"column {column.name} is {known.type} in {url} and {column.type} in {root.url}; "
                    "read these roots one at a time"
                ) from error


# --- Connections ---------------------------------------------------------------------------------------

_QUERY_WORDS = ("select", "from", "with", "pivot", "unpivot", "values", "describe", "show", "summarize", "(")
_LEADING_COMMENTS = re.compile(r"(\s+|--[^\n]*(\n|$)|/\*.*?\*/)*", re.DOTALL)
_WRITING_WORD = re.compile(r"\b(insert|update|delete|copy|merge)\b", re.IGNORECASE)
_WRITING_PART = re.compile(r'"type":"(?!SELECT_)[A-Z]+_QUERY_NODE"')  # JSON escapes the quotes of a text
_EXPLAIN = re.compile(r"explain(\s*\([^)]*\)|\s+analyze\b)?", re.IGNORECASE)

_ledgers: WeakKeyDictionary[duckdb.DuckDBPyConnection, list[KeptLedger]] = WeakKeyDictionary()
_snapshots: WeakKeyDictionary[duckdb.DuckDBPyConnection, list[Snapshot]] = WeakKeyDictionary()


def connect(
    *roots: RootLike | Iterable[RootLike],
    without: Iterable[str] = (),
    sealed: bool = False,
    memory_bytes: int | None = None,
) -> duckdb.DuckDBPyConnection:
    """Return an in-memory DuckDB with a view for each table of one or several runs.

    The views are rollouts, groups, steps, evals, batches, all_batches, attempts, attempt_chain, workers, code,
    policies, metrics, reference, token_stats, mismatch, scores and more; the files in ludic/root/sql/views/ describe
    them. The table `roots` has a row for each run.

    rollouts and evals, and so groups and steps, stay as they were at the first query that reads them, until `refresh`.
    without: names below each root of Parquet files to leave out, such as those that can't be read.
    sealed: DuckDB opens files of these roots and no others, loads no extension and keeps its settings. A statement can
    still write into the roots, by COPY or ATTACH, for example: `check_only_reads` refuses such statements.
    memory_bytes: memory of all queries together, which then write nothing to disk; None leaves DuckDB's limit.
    """
    opened, without = open_roots(roots), list(without)
    con = open_duckdb()
    if memory_bytes is not None:
        con.execute(f"set memory_limit = '{memory_bytes} B'")
        con.execute("set temp_directory = ''")
    snapshots = [Snapshot(root, without) for root in opened]
    urls = create_views(con, opened, snapshots, without)
    # Refresh last: DuckDB requests the files when it creates a view, although it needs only the columns.
    for snapshot in snapshots:
        snapshot.refresh()
    _snapshots[con] = snapshots
    if not without:  # broken files are few, and those that look for them ask once
        numbered = enumerate(zip(opened, urls, strict=True))
        _ledgers[con] = [KeptLedger(root, number, url) for number, (root, url) in numbered]
    if sealed:
        seal(con, [*urls, *(str(folder) for snapshot in snapshots for folder in snapshot.folders())])
    return con


class Connections:
    """Connections to roots, each opened once, by URL; as a context manager, it closes those that it opened."""

    def __init__(self, lent: Mapping[str, duckdb.DuckDBPyConnection] | None = None) -> None:
        """lent: open connections by the URL of their root, which stay open."""
        self._lent = dict(lent or {})
        self._opened: dict[str, duckdb.DuckDBPyConnection] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for con in self._opened.values():
            con.close()

    def to(self, root: Root) -> duckdb.DuckDBPyConnection:
        """Return the connection to one root."""
        if root.url in self._lent:
            return self._lent[root.url]
        if root.url not in self._opened:
            self._opened[root.url] = connect(root)
        return self._opened[root.url]


def seal(con: duckdb.DuckDBPyConnection, folders: Iterable[str] = ()) -> None:
    """Restrict the connection to files of these folders (or URLs), and lock its settings."""
    # DuckDB checks patterns first, and then the files that they match.
    allowed = dict.fromkeys(name for folder in folders for name in (f"{folder}/", escape_glob(f"{folder}/")))
    con.execute(f"set allowed_directories = {quote_list(allowed)}")
    con.execute("set enable_external_access = false")
    con.execute("set lock_configuration = true")


def check_only_reads(con: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise QueryError for a statement that is not a query. Raises duckdb.Error for text that is not SQL."""
    for statement in con.extract_statements(sql):
        if not _is_query(con, statement):
            is_select = statement.type == duckdb.StatementType.SELECT
            found = "SELECT with a part that writes" if is_select else statement.type.name
            raise QueryError(
                f"{found} is not a query; wanted SELECT, FROM, WITH, PIVOT, DESCRIBE, SHOW, SUMMARIZE or EXPLAIN of "
                "one of these"
            )


def _is_query(con: duckdb.DuckDBPyConnection, statement: duckdb.Statement) -> bool:
    text = _LEADING_COMMENTS.sub("", statement.query, count=1)
    if statement.type == duckdb.StatementType.EXPLAIN:
        # EXPLAIN ANALYZE runs what it explains.
        try:
            explained = con.extract_statements(_EXPLAIN.sub("", text, count=1))
        except duckdb.Error:
            return False
        return all(_is_query(con, inner) for inner in explained)
    # PIVOT becomes several statements, also inside of a COPY.
    is_pivot = statement.type == duckdb.StatementType.MULTI and text.lower().startswith(_QUERY_WORDS)
    return (is_pivot or statement.type == duckdb.StatementType.SELECT) and not _writes(con, text)


def _writes(con: duckdb.DuckDBPyConnection, query: str) -> bool:
    """Return whether a query has a part that writes, such as `with x as (copy ... to ...) from x`."""
    if not _WRITING_WORD.search(query):
        return False
    # DuckDB's own parser says it: another one would read strings, comments and spaces in another way.
    [(tree,)] = con.execute("select json_serialize_sql($query)", {"query": query}).fetchall()
    is_known = tree.startswith('{"error":false')  # PIVOT has no tree
    return _WRITING_PART.search(tree) is not None if is_known else query.lower().startswith("with")


def refresh(con: duckdb.DuckDBPyConnection) -> None:
    """Let `rollouts` and `evals` of a connection show new files from the next query on.

    Raises QueryError if `connect` did not create the connection, for example for a cursor.
    """
    if con not in _snapshots:
        raise QueryError("refresh needs a connection that ludic.connect returned, not a cursor of one")
    for snapshot in _snapshots[con]:
        snapshot.refresh()


def renew(con: duckdb.DuckDBPyConnection) -> None:
    """Do as `refresh` does, but list the files in this call, so that no query waits for it. Raises QueryError.

    From then on the ledger is in memory, as of the last call, so that no query reads its files again.
    """
    if con not in _snapshots:
        raise QueryError("renew needs a connection that ludic.connect returned, not a cursor of one")
    for snapshot in _snapshots[con]:
        snapshot.renew()
    for ledger in _ledgers.get(con, ()):
        ledger.renew(con)


def open_duckdb() -> duckdb.DuckDBPyConnection:
    """Return an empty in-memory DuckDB with ludic's macros, in UTC, that does not read Python variables as tables."""
    con = duckdb.connect()
    con.execute("set TimeZone = 'UTC'")
    con.execute("set python_enable_replacements = false")
    # DuckDB would draw its progress bar into results on stdout, and over the terminal viewer.
    with suppress(duckdb.InvalidInputException):  # in a notebook without ipywidgets, where it draws none
        con.execute("set enable_progress_bar = false")
    # Files never change, and reading the footers of a million rollouts takes a third of the time of their advantages.
    con.execute("set parquet_metadata_cache = true")
    create_macros(con)
    return con
