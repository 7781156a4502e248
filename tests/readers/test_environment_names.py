"""What other tools make of an environment's name, which is a partition's value: docs/reading.md says so."""

from collections.abc import Callable, Collection
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.dataset as ds
import pytest

from ludic.root.root import Root

pytestmark = pytest.mark.filterwarnings(r"ignore:.*is deprecated.*:DeprecationWarning:ray\.data\.context")

Names = set[tuple[Any, str]]
"""env, as the path has it, and env_name, as the rows have it."""

ODD = ("moar_cats", "reasoning_gym/x", "a b%", "катки")
DIGITS = ("007", "12")


def with_duckdb(root: Root) -> Names:
    files = f"{root.url}/rollouts/version=*/env=*/*.parquet"
    with duckdb.connect() as con:
        query = "select distinct env, env_name from read_parquet($files, hive_partitioning = true)"
        return set(con.execute(query, {"files": files}).fetchall())


def with_polars(root: Root) -> Names:
    frame = pl.scan_parquet(f"{root.url}/rollouts/version=*/env=*/*.parquet", hive_partitioning=True)
    return set(frame.select("env", "env_name").unique().collect().rows())


def with_pyarrow(root: Root) -> Names:
    table = ds.dataset(f"{root.url}/rollouts", partitioning="hive").to_table(columns=["env", "env_name"])
    return {tuple(row.values()) for row in table.to_pylist()}


def with_pandas(root: Root) -> Names:
    frame = pd.read_parquet(f"{root.url}/rollouts", columns=["env", "env_name"])
    return set(frame.astype(object).itertuples(index=False, name=None))


def with_ray(root: Root) -> Names:
    ray = pytest.importorskip("ray.data")
    rows = ray.read_parquet(f"{root.url}/rollouts").select_columns(["env", "env_name"])
    return {tuple(row.values()) for row in rows.take_all()}


def with_spark(root: Root) -> Names:
    spark = pytest.importorskip("pyspark.sql").SparkSession.active()
    rows = spark.read.parquet(f"{root.url}/rollouts").select("env", "env_name").distinct()
    return {tuple(row) for row in rows.collect()}


RootOf = Callable[[Collection[str]], Root]


@pytest.mark.parametrize("read", [with_duckdb, with_polars, with_pyarrow, with_pandas])
def test_odd_names_come_back_as_they_were(root_of: RootOf, read: Callable[[Root], Names]):
    assert read(root_of(ODD)) == {(name, name) for name in ODD}


def test_odd_names_come_back_as_they_were_in_ray(root_of: RootOf, ray_session: None):
    assert with_ray(root_of(ODD)) == {(name, name) for name in ODD}


def test_spark_garbles_a_partition_beyond_ascii_and_reads_the_column_right(root_of: RootOf, spark_session: None):
    found = {env_name: env for env, env_name in with_spark(root_of(ODD))}
    garbled = found.pop("катки")
    assert garbled == "катки".encode().decode("latin-1")
    assert found == {name: name for name in ODD[:-1]}


def test_names_of_digits_alone_stay_text_in_duckdb(root_of: RootOf):
    assert with_duckdb(root_of(DIGITS)) == {("007", "007"), ("12", "12")}


def test_names_of_digits_alone_stay_text_in_ray(root_of: RootOf, ray_session: None):
    assert with_ray(root_of(DIGITS)) == {("007", "007"), ("12", "12")}


@pytest.mark.parametrize("read", [with_polars, with_pyarrow, with_pandas])
def test_names_of_digits_alone_become_numbers_elsewhere(root_of: RootOf, read: Callable[[Root], Names]):
    assert read(root_of(DIGITS)) == {(7, "007"), (12, "12")}


def test_names_of_digits_alone_become_numbers_in_spark(root_of: RootOf, spark_session: None):
    assert with_spark(root_of(DIGITS)) == {(7, "007"), (12, "12")}


@pytest.mark.parametrize("read", [with_duckdb, with_polars, with_pyarrow, with_pandas])
def test_one_other_name_keeps_all_of_them_text(root_of: RootOf, read: Callable[[Root], Names]):
    names = (*DIGITS, "moar_cats")
    assert read(root_of(names)) == {(name, name) for name in names}
