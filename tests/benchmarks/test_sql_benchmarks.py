"""Contestants of the SQL and the point-read benchmarks do the same work; no figure is checked."""

import os
import sys
from pathlib import Path

import pytest

import ludic
from ludic.root.rows.files import list_files

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks are no part of the package

from benchmarks import credit, many_files, point_read, sql
from benchmarks.measure import in_a_process
from benchmarks.stores import compact_copy, make_store


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("stores")
    small = make_store(str(folder / "small"), 6, num_versions=2, mean_length=5, base_groups=16)
    return small, compact_copy(small, str(folder / "compacted"))


def test_all_contestants_get_the_same_advantages(stores, tmp_path):
    small, compacted = stores
    expected = sql.by_id(sql.by_sql(ludic.connect(small)))
    # Some of 6 x 64 are dropped by the flags that are drawn for them.
    assert 300 < len(expected) < 384
    of_rows = sql.row_contestants(small, tmp_path / "rows.jsonl")
    assert {name.partition(",")[0] for name in of_rows} == {"JSON lines", "MessagePack"}
    assert {"JSON lines, DuckDB", "JSON lines, json", "JSON lines, msgspec, needed fields"} <= of_rows.keys()
    found = [
        sql.by_id(sql.by_sql(ludic.connect(compacted))),
        sql.by_id(sql.by_sql(sql.plain_duckdb(small))),
        dict(sql.by_polars(ludic.scan(small)).rows()),
        dict(sql.by_polars(ludic.scan(compacted), rows_are_episodes=True).rows()),
        *(call() for call in of_rows.values()),
    ]
    for advantages in found:
        assert advantages == pytest.approx(expected)


def test_contestants_of_other_advantages_are_refused(stores):
    small, _ = stores
    found = sql.by_id(sql.by_sql(ludic.connect(small)))
    sql.check_same(small, {"the same": lambda: found})
    moved = {name: advantage + 1e-6 for name, advantage in found.items()}
    with pytest.raises(AssertionError, match="moved gets other advantages"):
        sql.check_same(small, {"moved": lambda: moved})
    with pytest.raises(AssertionError, match="none keeps other rollouts"):
        sql.check_same(small, {"none": dict})


def test_a_process_has_the_environment_of_its_call(monkeypatch):
    assert in_a_process(os.getpid) != os.getpid()  # the fork server runs from now on
    monkeypatch.setenv("LUDIC_TEST_OF_BENCHMARKS", "set later")
    assert in_a_process(os.getenv, "LUDIC_TEST_OF_BENCHMARKS") == "set later"
    monkeypatch.delenv("LUDIC_TEST_OF_BENCHMARKS")
    assert in_a_process(os.getenv, "LUDIC_TEST_OF_BENCHMARKS") is None


def test_compaction_leaves_a_file_a_version(stores):
    assert [len(list_files(root)) for root in stores] == [6, 2]


def test_all_counts_and_polls_see_the_same_rollouts(stores):
    small, _ = stores
    found = [
        many_files.count(ludic.connect(small)),
        many_files.count(sql.plain_duckdb(small)),
        many_files.poll(small),
        ludic.open(small.url).watch(once=True).totals.facts["rollouts"]["num_rollouts"],
    ]
    assert found == [6 * 64] * 4


def test_all_point_reads_find_the_row(stores, tmp_path):
    small, compacted = stores
    point_read.make_lance(small, str(tmp_path / "lance")).create_scalar_index("rollout_id", "BTREE")
    for rollout_id, version in point_read.some_ids(small, 4):
        rows = [
            point_read.by_ludic(small.url, True, rollout_id, version),
            point_read.by_ludic(compacted.url, False, rollout_id, version),
            point_read.by_duckdb(compacted.url, rollout_id, version),
            point_read.by_lance(str(tmp_path / "lance"), rollout_id, version),
        ]
        for row in rows:
            assert row["rollout_id"] == rollout_id
            assert row["response_tokens"] == rows[0]["response_tokens"]
            assert row["messages"] == rows[0]["messages"]


@pytest.mark.parametrize("name", credit.CONTESTANTS)
def test_each_advantage_of_agents_covers_every_row_of_its_benchmark(name: str):
    found = ludic.root.sql.advantages(credit.rollouts(160), name, **credit.CONTESTANTS[name])
    assert found.num_rows == 160
    assert found.column(1).null_count == 0
