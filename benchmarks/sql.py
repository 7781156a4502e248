"""Measure RLOO advantages of a million rollouts with all filters: SQL over files, Polars and plain Python.

    python -m benchmarks.sql

Timed from files to a table of rollout_id and advantage. The rows have all columns, but about 20 response tokens instead
of 1,000, to save disk space: the readers of Parquet do not read token lists. JSONL and MessagePack must decode token
lists to reach a reward; they get rows of 1,000 tokens, a part of all rows, in memory, and their times are extrapolated.
Files are in the page cache.
"""

import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import msgpack
import polars as pl
import pyarrow as pa
import tyro

import ludic
from benchmarks.measure import median_ratio, print_table, take_turns
from benchmarks.rollouts import make_batch
from benchmarks.stores import GROUP_SIZE, GROUPS_A_FILE, compact_copy, make_store
from ludic.schema import to_table
from ludic.sql import advantages
from ludic.sql.snapshot import CACHE_VARIABLE
from ludic.store import Root, list_files

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
_PART = 2_000
_ROWS_A_FILE = GROUPS_A_FILE * GROUP_SIZE


def main(quick: bool = False) -> None:
    """Print two tables.

    Args:
        quick: Use few files and one round, to check that the benchmark works.
    """
    num_files, rounds = (70, 1) if quick else (15_000, 7)
    folder = Path(tempfile.mkdtemp())
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    try:
        small = make_store(str(folder / "small"), num_files, num_versions=20, mean_length=20)
        compacted = compact_copy(small, str(folder / "compacted"))
        print_contestants(compacted, num_files * _ROWS_A_FILE, rounds)
        print_many_files(small, compacted, rounds)
    finally:
        shutil.rmtree(folder)


def print_contestants(root: Root, num_rows: int, rounds: int) -> None:
    con = connect(root)
    part = to_table(make_batch(_PART // GROUP_SIZE), run_id="none", sequence=0).to_pylist(maps_as_pydicts="lossy")
    factor = num_rows / len(part)
    lines, packed = "\n".join(json.dumps(row, default=str) for row in part), msgpack.packb(part, default=str)
    seconds = take_turns(
        {
            "ludic: SQL": partial(by_sql, con),
            "Polars, an episode counts once": lambda: by_polars(ludic.scan(root)),
            "Polars, a row is an episode": lambda: by_polars(ludic.scan(root), rows_are_episodes=True),
            f"MessagePack and Python, x {factor:.1f}": lambda: by_python(msgpack.unpackb(packed)),
            f"JSON lines and Python, x {factor:.1f}": lambda: by_python(map(json.loads, lines.splitlines())),
        },
        rounds,
    )
    ours = next(iter(seconds))
    rows = []
    for name, taken in seconds.items():
        whole = [each * (factor if "Python" in name else 1) for each in taken]
        rows.append([name, f"{median(whole):.2f} s", f"{median_ratio(whole, seconds[ours]):.2g}x"])
    print_table(
        f"Advantages of {num_rows:,} rollouts, {len(list_files(root))} compacted files",
        ["", "time", "of ludic's"],
        rows,
    )


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


def by_polars(rollouts: pl.LazyFrame, *, rows_are_episodes: bool = False) -> pl.DataFrame:
    reward = pl.col("episode_reward")
    episodes = rollouts if rows_are_episodes else rollouts.group_by("group_id", "episode_id").agg(reward.max())
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


def by_python(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the advantage by rollout_id; applies the filters that can drop rows of these data."""
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["group_id"]].append(row)
    return {rollout_id: advantage for group in groups.values() for rollout_id, advantage in _rloo(group)}


def _rloo(group: list[dict[str, Any]]) -> Iterable[tuple[str, float]]:
    rewards = {row["episode_id"]: row["episode_reward"] for row in group if row["episode_reward"] is not None}
    if len(set(rewards.values())) < 2:
        return
    total = sum(rewards.values())
    for row in group:
        dropped = row["truncated"] or row["incomplete_completion"] or row["parse_error"] or row["error"]
        too_old = PARAMS["trainer_version"] - row["policy_version"] > PARAMS["max_off_policy_steps"]
        if not dropped and not too_old and row["episode_reward"] is not None:
            yield row["rollout_id"], row["episode_reward"] - (total - row["episode_reward"]) / (len(rewards) - 1)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
