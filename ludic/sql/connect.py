"""A DuckDB connection over the root of a run, and a Polars scan of its rollouts.

Reads the root only, by globs that each query lists anew: files that were written since are seen, and
none has to be there. Raises MissingRootError where there is no run, QueryError for a folder that
DuckDB can't name. A broken file fails the queries that meet it, with DuckDB's error, unless left out.
"""

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from string import Template

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds

from ludic.errors import QueryError
from ludic.schema import arrow_schema
from ludic.sql.filesystem import RangedFileSystem
from ludic.store.root import Root

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
    "policies": "policies",
    "attempts": "attempts",
    "attempt_chain": None,
    "all_batches": "batches",
    "batches": None,
    "groups": None,
    "steps": None,
}
_PARTITION = pa.schema([("version", pa.int64()), ("env", pa.string())])


def connect(root: str | Root, *, without: Iterable[str] = ()) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB with the views rollouts, groups, steps, evals, batches, all_batches, attempts,
    attempt_chain, policies and metrics over the files of a run; ludic/sql/views/ says what each holds.

    without: names below the root of Parquet files to leave out, such as those that can't be read.
    """
    root = Root.open(root) if isinstance(root, str) else root
    url = _duckdb_url(root)
    con = open_duckdb()
    if not root.is_local:
        con.register_filesystem(RangedFileSystem(root.fs))
    con.execute("create schema empty")
    values = {"root": _literal(_escape_glob(url)), "without": _list_literal(f"{url}/{name}" for name in without)}
    for view, table in _VIEWS.items():
        text = resources.files("ludic.sql").joinpath("views", f"{view}.sql").read_text(encoding="utf-8")
        columns = _create_empty_table(con, table) if table else {}
        con.execute(f"create view {view} as\n{Template(text).safe_substitute(values | _column_literals(columns))}")
    return con


def open_duckdb() -> duckdb.DuckDBPyConnection:
    """An empty in-memory DuckDB, in UTC, that never takes a Python variable for a table."""
    con = duckdb.connect()
    con.execute("set TimeZone = 'UTC'")
    con.execute("set python_enable_replacements = false")
    return con


def scan(root: str | Root) -> pl.LazyFrame:
    """The rollouts that are there now as a lazy frame, with the partition keys version and env as columns.

    A filter on version or env skips files unread. Raises MissingRootError where there is no run.
    """
    root = Root.open(root) if isinstance(root, str) else root
    files = [root.at(name) for name in root.list("rollouts") if name.endswith(".parquet")]
    if not files:
        return _empty_frame(arrow_schema("rollouts"), _PARTITION).lazy()
    return _scan_local(root) if root.is_local else _scan_dataset(root, files)


def _scan_local(root: Root) -> pl.LazyFrame:
    """By Polars itself: ten times as fast as through pyarrow, over 2,000 files."""
    return pl.scan_parquet(
        root.at("rollouts"),
        glob=False,
        schema=_empty_frame(arrow_schema("rollouts")).schema,
        hive_schema=_empty_frame(_PARTITION).schema,
        missing_columns="insert",
        extra_columns="ignore",
    )


def _scan_dataset(root: Root, files: list[str]) -> pl.LazyFrame:
    """Through pyarrow, which reads from any fsspec filesystem, as Polars does not."""
    dataset = ds.dataset(
        files,
        schema=pa.schema([*arrow_schema("rollouts"), *_PARTITION]),
        format="parquet",
        filesystem=root.fs,
        partitioning=ds.partitioning(_PARTITION, flavor="hive"),
        partition_base_dir=root.at("rollouts"),
    )
    return pl.scan_pyarrow_dataset(dataset)


def _empty_frame(*schemas: pa.Schema) -> pl.DataFrame:
    frame = pl.from_arrow(pa.schema([field for schema in schemas for field in schema]).empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame


def _create_empty_table(con: duckdb.DuckDBPyConnection, table: str) -> dict[str, str]:
    """DuckDB's type of each column. A glob without files has no columns; empty.TABLE has them, and no rows."""
    schema = _JSON_TABLES[table] if table in _JSON_TABLES else arrow_schema(table)
    con.register("no_rows", schema.append(pa.field("filename", pa.string())).empty_table())
    con.execute(f"create or replace table empty.{table} as from no_rows")
    con.unregister("no_rows")
    types = con.table(f"empty.{table}").types
    return {name: str(type_) for name, type_ in zip(schema.names, types, strict=False)}


def _column_literals(columns: Mapping[str, str]) -> dict[str, str]:
    """What views say of their files' columns.

    `schema` makes read_parquet fill what older files lack, without opening every file to see what it has.
    """
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
