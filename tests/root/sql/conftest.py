"""Roots to write to, and tables of rollouts to plan over."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from strategies import make_batch

from ludic.records.conversion import to_table
from ludic.records.tables import arrow_schema
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile
from ludic.root.rows.parquet import encode
from ludic.root.sql.connection import open_duckdb
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


@cache
def connection() -> duckdb.DuckDBPyConnection:
    """One without a run, for tests that register `rollouts` themselves: to open one takes longer than to ask it."""
    return open_duckdb()


Rows = Callable[..., pa.Table]
Store = Callable[[pa.Table], str]


@pytest.fixture(autouse=True)
def cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where scalars of runs with many files stay, instead of the user's own cache."""
    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def filesystem() -> str:
    """Where `root` lies. SQL means the same anywhere; tests of how files are read set "local" and "memory" instead."""
    return "local"


@pytest.fixture
def root(filesystem: str, tmp_path: Path) -> Iterator[Root]:
    url = str(tmp_path / "run") if filesystem == "local" else f"memory://{uuid.uuid4()}"
    root = put_run(url, RunConfig(model="tiny", env=("moar_cats",)))
    yield root
    root.fs.rm(root.path, recursive=True)


@pytest.fixture
def rows() -> Rows:
    """rows([[1.0, 0.0], [0.5]], truncated=[True, False, False]): two groups with these rewards, a column replaced."""

    def make(
        rewards: Sequence[Sequence[float | None]], *, seed: int = 0, sequence: int = 0, **columns: Any
    ) -> pa.Table:
        options = {name: columns.pop(name) for name in ("policy_version", "env_name", "num_turns") if name in columns}
        batch = make_batch(rewards=rewards, seed=seed, **options)
        table = to_table(batch, run_id="run", sequence=sequence)
        for name, values in columns.items():
            table = replace_column(table, name, values)
        return table

    return make


def replace_column(table: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    field = arrow_schema("rollouts").field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))


@pytest.fixture
def arrive(rows: Rows) -> Rows:
    """As rows, with the address columns of a file that was read as number `arrival`."""

    def make(rewards: Sequence[Sequence[float | None]], *, arrival: int = 0, **options: Any) -> pa.Table:
        table = rows(rewards, seed=options.pop("seed", arrival), **options)
        indexes = range(table.num_rows)
        return (
            table.append_column("file", pa.array([f"file-{arrival}"] * len(indexes)))
            .append_column("row_group", pa.array([0] * len(indexes), pa.int32()))
            .append_column("row", pa.array(indexes, pa.int32()))
            .append_column("arrival", pa.array([arrival] * len(indexes), pa.int64()))
            .append_column("refusal", pa.nulls(len(indexes), pa.string()))
        )

    return make


@pytest.fixture
def store(root: Root) -> Store:
    """Puts a table where a worker would, by its first row; gives back the name."""

    def put(table: pa.Table) -> str:
        first = table.slice(0, 1).to_pylist()[0]
        file = RolloutFile(first["policy_version"], first["env_name"], first["worker_id"], first["sequence"])
        assert root.put_if_absent(file.name, encode(table))
        return file.name

    return put
