"""Small Parquet files whose rows would fill the memory: each table refuses them by name, before they are in memory.

The cases follow from the tables of the catalogue.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from every_kind import KINDS, a_file, a_name, make_full_root
from strategies import make_batch

from ludic.app.show.stats import collect_stats
from ludic.app.show.watch import Watcher
from ludic.errors import SchemaError
from ludic.records.conversion import to_table
from ludic.records.tables import arrow_schema
from ludic.root.catalogue import METRICS, REFERENCE, Table
from ludic.root.maintenance.verify import tables as verified
from ludic.root.maintenance.verify.tables import check_file, read_footers
from ludic.root.root import Root
from ludic.root.rows import parquet, tables
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import MOST_ROW_GROUP_ROWS, decode, open_parquet, read_columns, read_row_groups
from ludic.root.rows.reader import read_small_files
from ludic.root.rows.tables import read_reference_index, read_table
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

TABLES = [row for row in KINDS if isinstance(row, Table)]
by_table = pytest.mark.parametrize("row", TABLES, ids=lambda row: row.kind)
_GROUP = 1 << 14
"""Most rows of a row group in these tests, since a million rows of rollouts take long to write."""


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MOST_ROW_GROUP_ROWS", _GROUP)


_POOLS: list[pa.ProxyMemoryPool] = []
"""Pools that were in place once. They stay, since Arrow crashes when memory of a pool that is gone is freed, and an
exception's traceback, a cache or another thread may hold such memory beyond the block."""


@contextmanager
def memory_below(most_bytes: int) -> Iterator[None]:
    """Fail if Arrow holds more at a time in the block."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        yield
    finally:
        pa.set_memory_pool(before)
    assert (pool.max_memory() or 0) < most_bytes


def a_row(root: Root, row: Table[Any], name: str) -> pa.Table:
    if row.table == "rollouts":
        return to_table(make_batch(worker_id="w7-test"), run_id=root.run_id, sequence=7).slice(0, 1)
    rows = pq.read_table(pa.BufferReader(a_file(root, row, name)))
    return rows.replace_schema_metadata(arrow_schema(row.table).metadata)  # pyarrow writes no digests


def with_value(rows: pa.Table, column: str, value: Any) -> pa.Table:
    index, field = rows.schema.get_field_index(column), rows.schema.field(column)
    return rows.set_column(index, field, pa.array([value] * rows.num_rows, field.type))


def put_equal_rows(root: Root, row: Table[Any], num_rows: int) -> str:
    """A file of equal rows in one row group, which stores each value once; returns its name."""
    name = row.name(a_name(row))
    rows = a_row(root, row, name)
    path = Path(root.path, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows.take([0] * num_rows), path, compression="zstd", row_group_size=num_rows)
    assert pq.read_metadata(path).num_rows == num_rows
    assert pq.read_metadata(path).num_row_groups == 1
    return name


def put_rows(root: Root, row: Table[Any], rows: pa.Table) -> str:
    path = Path(root.path, name := row.name(a_name(row)))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, compression="zstd", row_group_size=1 << 30, dictionary_pagesize_limit=1 << 30)
    return name


def read_whole(root: Root, row: Table[Any], name: str) -> pa.Table:
    """All rows of a file, as its readers take them."""
    if row.table == "rollouts":
        return read_columns(root, name, arrow_schema("rollouts").names)
    return decode(root.read(name), f"{root.url}/{name}", row.table)


@by_table
@pytest.mark.usefixtures("small_row_groups")
def test_more_equal_rows_than_ludic_reads_are_refused_by_name(
    tmp_path: Path, run_config: RunConfig, row: Table
) -> None:
    root = put_run(str(tmp_path), run_config)
    most = min(row.most_rows, _GROUP)
    name = put_equal_rows(root, row, most + 1)
    assert Path(root.path, name).stat().st_size < 4 << 20
    told = f"it holds {most + 1:,} rows, wanted at most {most:,} in a "
    with memory_below(1 << 20):
        (finding,) = check_file(root, name).findings
        assert (finding.check, finding.where) == ("unreadable", name)
        assert told in finding.problem
        (footer,) = read_footers(root, row.folder)
        assert told in str(footer.problem)
        with pytest.raises(SchemaError, match=f"{name}: {told}"):
            read_whole(root, row, name)
        with pytest.raises(SchemaError, match=f"{name}: {told}"), open_parquet(root, name, row.table):
            pass
        if row.table != "rollouts":
            with pytest.raises(SchemaError, match=f"{name}: {told}"):
                read_table(root, row, row.parse(name))
        else:
            files = list_files(root, folder=row.folder)
            assert list(read_small_files(root, files, ["rollout_id", "episode_reward"])) == []
    if row is REFERENCE:
        assert read_reference_index(root, a_name(row).model).num_rows == 0


@pytest.mark.parametrize("row", [row for row in TABLES if row.most_rows <= 1 << 16], ids=lambda row: row.kind)
def test_as_many_rows_as_ludic_reads_are_read(tmp_path: Path, run_config: RunConfig, row: Table) -> None:
    root = put_run(str(tmp_path), run_config)
    name = put_equal_rows(root, row, row.most_rows)
    assert check_file(root, name).findings == ()
    with pytest.raises(AssertionError), memory_below(1000):
        assert read_whole(root, row, name).num_rows == row.most_rows


def test_a_metrics_file_of_half_a_megabyte_is_not_read(tmp_path: Path, run_config: RunConfig) -> None:
    root = put_run(str(tmp_path), run_config)
    name = put_equal_rows(root, METRICS, 100_000)
    with memory_below(1 << 20):
        status = Watcher(root.url).poll()
    assert status.steps == status.calls == []
    (problem,) = status.unreadable
    assert (
        f"{name}: it holds 100,000 rows, wanted at most 4,096 in a file of metrics; ludic does not read it" in problem
    )


def test_limits_lie_far_above_what_ludic_writes_and_below_what_fills_the_memory() -> None:
    written = {"metrics": 64, "scores": 4096, "labels": 1, "requests": 1 << 16, "rollouts": 1024}
    for row in TABLES:
        assert 16 * written.get(row.table, 1024) <= row.most_rows <= 1 << 23
    assert 16 * max(written.values()) <= MOST_ROW_GROUP_ROWS <= 1 << 20


MOST = 1 << 20
"""Most bytes in memory, in the tests below."""


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (parquet, tables, verified):
        for name in ("MOST_ROW_GROUP_BYTES", "MOST_FILE_BYTES"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, MOST)


@by_table
@pytest.mark.usefixtures("small_memory")
def test_one_long_text_repeated_is_refused_by_name(tmp_path: Path, run_config: RunConfig, row: Table) -> None:
    root = put_run(str(tmp_path), run_config)
    schema = arrow_schema(row.table)
    column = next(field.name for field in schema if pa.types.is_string(field.type) and field.name != "run_id")
    rows = with_value(a_row(root, row, row.name(a_name(row))), column, "x" * 100_000)
    name = put_rows(root, row, rows.take([0] * 300))
    assert Path(root.path, name).stat().st_size < 50_000
    with memory_below(8 << 20):
        with pytest.raises(SchemaError, match=f"{name}: its rows take over {MOST:,} bytes of memory"):
            read_whole(root, row, name)
        (finding,) = check_file(root, name).findings
        assert "its rows take over" in finding.problem
    put_rows(root, row, rows.take([0] * 5))
    assert read_whole(root, row, name)[column].to_pylist() == ["x" * 100_000] * 5


LISTS = [
    (row, field.name)
    for row in TABLES
    for field in arrow_schema(row.table)
    if pa.types.is_list(field.type) and pa.types.is_primitive(field.type.value_type)
]


@pytest.mark.parametrize(("row", "column"), LISTS, ids=lambda value: getattr(value, "kind", value))
@pytest.mark.usefixtures("small_memory")
def test_a_list_of_many_equal_values_is_refused_by_name(
    tmp_path: Path, run_config: RunConfig, row: Table, column: str
) -> None:
    root = put_run(str(tmp_path), run_config)
    rows = a_row(root, row, row.name(a_name(row)))
    value = False if pa.types.is_boolean(rows.schema.field(column).type.value_type) else 0
    name = put_rows(root, row, with_value(rows, column, [value] * 2_000_000))
    assert Path(root.path, name).stat().st_size < 50_000
    with memory_below(MOST):
        with pytest.raises(SchemaError, match=f"{name}: its values take .* bytes of memory, wanted at most {MOST:,}"):
            read_whole(root, row, name)
        if row.table == "rollouts":
            with open_parquet(root, name) as file, pytest.raises(SchemaError, match="its values take"):
                read_row_groups(file, [0], [column], name)
            assert read_columns(root, name, ["rollout_id"]).num_rows == 1
        (finding,) = check_file(root, name).findings
        assert "its values take" in finding.problem


@pytest.mark.slow
@pytest.mark.usefixtures("small_row_groups")
def test_stats_and_watch_show_the_rest_and_name_the_files(tmp_path: Path) -> None:
    full = make_full_root(tmp_path)
    copy = Root.open(str(shutil.copytree(full.path, tmp_path / "copy")))
    names = [put_equal_rows(copy, row, min(row.most_rows, _GROUP) + 1) for row in TABLES]
    with memory_below(64 << 20):
        facts = collect_stats(copy).facts
        status = Watcher(copy.url).poll()
    assert {each["name"] for each in facts["unreadable"]} == set(names)
    of_bytes = {"bytes_per_response_token": None}
    assert facts["rollouts"] | of_bytes == collect_stats(full).facts["rollouts"] | of_bytes
    assert any(METRICS.name(a_name(METRICS)) in problem for problem in status.unreadable)
    assert status.steps == Watcher(full.url).poll().steps
