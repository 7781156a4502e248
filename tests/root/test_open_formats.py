"""The files without ludic: what pyarrow, Polars and DuckDB see, and how the columns are encoded."""

import io
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from strategies import make_batch

from ludic.records.conversion import to_table
from ludic.records.rollout import RolloutBatch
from ludic.root.rows.parquet import encode
from ludic.root.rows.writer import RolloutWriter
from ludic.run.run_json import put_run

ODD_NAME = "reasoning_gym/a b%"


@pytest.fixture
def folder(tmp_path, run_config) -> Path:
    """rollouts/ with 2 groups of 3 rows in each of version 0 and 1 of two environments: 24 rows."""
    root = put_run(str(tmp_path / "run"), run_config)
    with RolloutWriter(root, "w0") as writer:
        for seed, (version, env_name) in enumerate((v, e) for v in (0, 1) for e in ("moar_cats", ODD_NAME)):
            writer.append(
                make_batch(
                    worker_id="w0", num_groups=2, group_size=3, policy_version=version, env_name=env_name, seed=seed
                )
            )
    return tmp_path / "run" / "rollouts"


def spoil_version(folder: Path, version: int) -> None:
    """What reads the files of this version fails from now on."""
    files = sorted((folder / f"version={version}").rglob("*.parquet"))
    assert len(files) == 2
    for file in files:
        file.write_bytes(b"PAR1 this is no Parquet file PAR1")


def count_with_pyarrow(folder: Path, version: int | None) -> int:
    dataset = ds.dataset(folder, partitioning="hive")
    return dataset.count_rows(filter=None if version is None else pc.field("version") == version)


def count_with_pyarrow_parquet(folder: Path, version: int | None) -> int:
    filters = None if version is None else [("version", "=", version)]
    return pq.read_table(folder, columns=["rollout_id"], filters=filters).num_rows


def count_with_polars(folder: Path, version: int | None) -> int:
    frame = pl.scan_parquet(folder / "**/*.parquet", hive_partitioning=True)
    frame = frame if version is None else frame.filter(pl.col("version") == version)
    return frame.select(pl.col("rollout_id").n_unique()).collect().item()


def count_with_duckdb(folder: Path, version: int | None) -> int:
    query = "select count(distinct rollout_id) from read_parquet($files, hive_partitioning = true)"
    values = {"files": str(folder / "**/*.parquet")}
    with duckdb.connect() as con:
        if version is not None:
            query, values = f"{query} where version = $version", {**values, "version": version}
        return con.execute(query, values).fetchone()[0]


READERS = [count_with_pyarrow, count_with_pyarrow_parquet, count_with_polars, count_with_duckdb]


@pytest.mark.parametrize("count", READERS)
def test_other_tools_read_all_rows_and_know_the_partitions(folder, count):
    assert count(folder, None) == 24
    assert [count(folder, version) for version in (0, 1, 2)] == [12, 12, 0]


@pytest.mark.parametrize("count", READERS)
def test_other_tools_open_no_file_of_a_version_that_is_filtered_out(folder, count):
    spoil_version(folder, 1)
    assert count(folder, 0) == 12
    with pytest.raises((pa.ArrowException, pl.exceptions.PolarsError, duckdb.Error, OSError)):
        count(folder, 1)


def test_environments_come_back_by_name_in_every_tool(folder):
    names = ["moar_cats", ODD_NAME]
    arrow = ds.dataset(folder, partitioning="hive").to_table(columns=["env", "env_name"])
    assert arrow.column("env").to_pylist() == arrow.column("env_name").to_pylist()
    assert sorted(set(arrow.column("env").to_pylist())) == names
    polars = pl.scan_parquet(folder / "**/*.parquet", hive_partitioning=True).select("env", "env_name").collect()
    assert polars["env"].to_list() == polars["env_name"].to_list()
    with duckdb.connect() as con:
        query = "select distinct env, env_name from read_parquet($files, hive_partitioning = true) order by all"
        assert con.execute(query, {"files": str(folder / "**/*.parquet")}).fetchall() == [(n, n) for n in names]


def test_lists_and_structs_are_read_by_other_tools(folder):
    frame = pl.scan_parquet(folder / "version=0/env=moar_cats/*.parquet").collect()
    assert frame["response_tokens"].list.len().to_list() == frame["response_length"].to_list()
    with duckdb.connect() as con:
        query = (
            "select sum(len(response_logprobs)), sum(len(agent_steps)), any_value(messages[1].role) "
            "from read_parquet($f)"
        )
        files = {"f": str(folder / "version=0/env=moar_cats/*.parquet")}
        assert con.execute(query, files).fetchone() == (6 * 16, 6, "user")


# --- Encodings ----------------------------------------------------------------------------------------------


def chunks(batch: RolloutBatch) -> dict[str, pq.ColumnChunkMetaData]:
    """The first row group's columns, by path."""
    data = encode(to_table(batch, run_id="run", sequence=0))
    row_group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    columns = [row_group.column(index) for index in range(row_group.num_columns)]
    return {column.path_in_schema: column for column in columns}


def test_numbers_a_token_are_byte_streams_without_a_dictionary():
    columns = chunks(make_batch(num_turns=2))
    for name in ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards"):
        column = columns[f"{name}.list.element"]
        assert "BYTE_STREAM_SPLIT" in column.encodings
        assert not column.has_dictionary_page


@pytest.mark.parametrize(("num_groups", "has_dictionaries"), [(1, False), (64, True)])
def test_repeated_texts_are_in_a_dictionary_where_rows_are_many(num_groups, has_dictionaries):
    columns = chunks(make_batch(num_groups=num_groups))
    assert columns["env_name"].has_dictionary_page == has_dictionaries
    assert columns["policy_version"].has_dictionary_page == has_dictionaries


def test_statistics_are_kept_of_what_prunes_and_of_nothing_else():
    columns = chunks(make_batch())
    assert {name for name, column in columns.items() if column.is_stats_set} == {
        "group_id",
        "rollout_id",
        "policy_version",
        "env_name",
        "created_at",
    }


def test_what_may_be_long_is_compressed_with_zstd_and_nothing_else():
    columns = chunks(make_batch())
    long = (
        "response_tokens.list.element",
        "response_logprobs.list.element",
        "messages.list.element.content",
        "agent_steps.list.element.action",
        "rollout_id",
    )
    short = ("episode_reward", "num_turns", "truncated", "env_name", "messages.list.element.role")
    assert {columns[name].compression for name in long} == {"ZSTD"}
    assert {columns[name].compression for name in short} == {"UNCOMPRESSED"}


def test_one_group_is_found_by_its_statistics_alone(folder):
    """Row groups whose group_id range does not hold the one wanted are skipped."""
    file = next((folder / "version=0/env=moar_cats").iterdir())
    ids = pq.read_table(file, columns=["group_id"]).column(0).to_pylist()
    (fragment,) = ds.dataset(file).get_fragments()
    assert fragment.split_by_row_group(pc.field("group_id") == "not-there") == []
    assert len(fragment.split_by_row_group(pc.field("group_id") == ids[0])) == 1
