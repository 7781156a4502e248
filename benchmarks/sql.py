"""Measure RLOO advantages of a million rollouts with all filters: SQL over files, Polars, and readers of whole rows.

    python -m benchmarks.sql

Timed from files to rollout_id and advantage. The rows have all columns, but about 20 response tokens instead of
1,000, to save disk space: the readers of Parquet do not read token lists. JSON lines and MessagePack hold whole rows,
and a reader must at least skip token lists; they get 10,240 rows of 1,000 tokens, and their times are extrapolated.
Files are in the page cache, MessagePack in memory. All readers of rows are checked to get the advantages of ludic's
SQL. Ratios are to ludic and to the fastest reader of rows.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

import ludic
from benchmarks.measure import median_ratio, print_table, take_turns
from benchmarks.row_formats import readers, write_rows
from benchmarks.stores import compact_copy, make_store
from ludic.base import CACHE_VARIABLE
from ludic.root import Root
from ludic.root.rows import list_files
from ludic.root.sql import advantages
from ludic.settings import run_script

FILTERS = (
    "drop_errors",
    "drop_truncated",
    "drop_incomplete_completions",
    "drop_parse_errors",
    "drop_zero_variance_groups",
    "max_off_policy_steps",
    "max_age",
)
PARAMS: Mapping[str, Any] = {
    "trainer_version": 20,
    "max_off_policy_steps": 20,
    "max_age_s": 1e10,
    "now": "2026-11-20T00:00:00Z",
}
OURS = "ludic: SQL"
_JSON_COLUMNS = {
    **dict.fromkeys(("rollout_id", "group_id", "episode_id", "trajectory_id", "parent_rollout_id"), "VARCHAR"),
    **dict.fromkeys(("env_name", "agent_id", "error"), "VARCHAR"),
    **dict.fromkeys(("depth", "segment_index", "request_index", "response_length", "action_length"), "INTEGER"),
    **dict.fromkeys(("correct", "truncated", "incomplete_completion", "parse_error"), "BOOLEAN"),
    "episode_reward": "DOUBLE",
    "policy_version": "INTEGER",
    "created_at": "TIMESTAMPTZ",
}
"""Columns that DuckDB takes from JSON lines; it skips the others."""
_PART_FILES = 160
"""10,240 rollouts, of which DuckDB's query and connection, some 0.1 s whatever the rows, are about 5% of the time."""


def main(quick: bool = False) -> None:
    """Print two tables.

    Args:
        quick: Use few files and one round, to check that the benchmark works.
    """
    num_files, part_files, rounds = (70, 2, 1) if quick else (15_000, _PART_FILES, 7)
    folder = Path(tempfile.mkdtemp())
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    try:
        small = make_store(str(folder / "small"), num_files, num_versions=20, mean_length=20)
        compacted = compact_copy(small, str(folder / "compacted"))
        part = make_store(str(folder / "part"), part_files, num_versions=2, mean_length=1000)
        print_contestants(compacted, part, rounds)
        print_many_files(small, compacted, rounds)
    finally:
        shutil.rmtree(folder)


def print_contestants(root: Root, part: Root, rounds: int) -> None:
    """Print the times of all contestants; those that read whole rows read a part, and their times are extrapolated."""
    con, num_rows = connect(root), num_rollouts(root)
    with tempfile.TemporaryDirectory() as folder:
        contestants = row_contestants(part, Path(folder) / "rows.jsonl")
        check_same(part, contestants)
        seconds = take_turns(
            {
                OURS: partial(by_sql, con),
                "Polars, an episode counts once": lambda: by_polars(ludic.scan(root)),
                "Polars, a row is an episode": lambda: by_polars(ludic.scan(root), rows_are_episodes=True),
                **contestants,
            },
            rounds,
        )
    factor = num_rows / num_rollouts(part)
    for name in contestants:
        seconds[name] = [each * factor for each in seconds[name]]
    best = min(contestants, key=lambda name: median(seconds[name]))
    rows = [
        [f"{name}, x {factor:.1f}" if name in contestants else name, f"{median(taken):.2f} s"]
        + [f"{median_ratio(taken, seconds[reference]):.2g}x" for reference in (OURS, best)]
        for name, taken in seconds.items()
    ]
    title = f"Advantages of {num_rows:,} rollouts, {len(list_files(root))} compacted files"
    print_table(f"{title}; best reader of rows: {best}", ["", "time", "of ludic's", "of the best reader of rows"], rows)


def row_contestants(part: Root, lines: Path) -> dict[str, Callable[[], dict[str, float]]]:
    """Write the rows of a run in formats that hold whole rows, and return their readers."""
    files = write_rows(part, lines)
    oldest_version = PARAMS["trainer_version"] - PARAMS["max_off_policy_steps"]
    return {"JSON lines, DuckDB": partial(by_read_ndjson, lines), **readers(files, oldest_version)}


def check_same(root: Root, contestants: Mapping[str, Callable[[], dict[str, float]]]) -> None:
    """Raise AssertionError unless the contestants get the advantages that ludic's SQL gets."""
    wanted = by_id(by_sql(connect(root)))
    for name, call in contestants.items():
        found = call()
        assert found.keys() == wanted.keys(), f"{name} keeps other rollouts"
        assert all(abs(found[key] - wanted[key]) < 1e-9 for key in wanted), f"{name} gets other advantages"


def print_many_files(small: Root, compacted: Root, rounds: int) -> None:
    """Print the cost of small files: with an empty cache, with a full cache, and without ludic."""
    first = _seconds(lambda: by_sql(connect(small)))
    seconds = take_turns(
        {
            "compacted, connecting included": lambda: by_sql(connect(compacted)),
            "small files, connecting included": lambda: by_sql(connect(small)),
            "small files, DuckDB without ludic": lambda: by_sql(plain_duckdb(small)),
            "small files, Polars": lambda: by_polars(ludic.scan(small)),
        },
        min(rounds, 3),
    )
    reference = seconds["compacted, connecting included"]
    rows = [["small files, the first time on a machine", f"{first:.2f} s", f"{first / median(reference):.2g}x"]]
    rows += [[name, f"{median(s):.2f} s", f"{median_ratio(s, reference):.2g}x"] for name, s in seconds.items()]
    print_table(f"The same over {len(list_files(small)):,} files of 64 rollouts", ["", "time", "of compacted"], rows)


def connect(root: Root) -> duckdb.DuckDBPyConnection:
    con = ludic.connect(root)
    con.execute(f"set threads = {os.cpu_count() or 1}")
    return con


def plain_duckdb(root: Root) -> duckdb.DuckDBPyConnection:
    """Return a connection with a view over all files, as a user without ludic would create it."""
    con = duckdb.connect()
    files = "/rollouts/version=*/env=*/*.parquet"
    con.sql(f"from read_parquet('{root.path}{files}', hive_partitioning = true)").create_view("rollouts")
    return con


def by_sql(con: duckdb.DuckDBPyConnection) -> pa.Table:
    return advantages(con, "rloo", filters=FILTERS, **PARAMS)


def by_read_ndjson(lines: Path) -> dict[str, float]:
    """Read the needed columns once, with all cores, and run ludic's SQL over them."""
    con = duckdb.connect()
    con.execute(f"set threads = {os.cpu_count() or 1}")
    con.read_json(str(lines), format="newline_delimited", columns=_JSON_COLUMNS).create("rollouts")
    return by_id(by_sql(con))


def by_id(table: pa.Table) -> dict[str, float]:
    return dict(zip(table["rollout_id"].to_pylist(), table["advantage"].to_pylist(), strict=True))


def num_rollouts(root: Root) -> int:
    return ludic.scan(root).select(pl.len()).collect().item()


def by_polars(rollouts: pl.LazyFrame, *, rows_are_episodes: bool = False) -> pl.DataFrame:
    reward = pl.col("episode_reward")
    episodes = (
        rollouts if rows_are_episodes else rollouts.group_by("group_id", "episode_id", "agent_id").agg(reward.max())
    )
    groups = episodes.group_by("group_id").agg(
        n=reward.count(), total=reward.sum(), lowest=reward.min(), highest=reward.max()
    )
    age_s = pl.lit(PARAMS["now"]).str.to_datetime(time_zone="UTC") - pl.col("created_at")
    return (
        rollouts.join(groups, on="group_id")
        .filter(
            pl.col("error").is_null(),
            reward.is_not_null(),
            ~pl.col("truncated"),
            ~pl.col("incomplete_completion"),
            ~pl.col("parse_error"),
            pl.col("lowest") != pl.col("highest"),
            PARAMS["trainer_version"] - pl.col("policy_version") <= PARAMS["max_off_policy_steps"],
            age_s.dt.total_seconds() <= PARAMS["max_age_s"],
        )
        .select("rollout_id", advantage=reward - (pl.col("total") - reward) / (pl.col("n") - 1))
        .collect()
    )


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_script(main, description=__doc__)
