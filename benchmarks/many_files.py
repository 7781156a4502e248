"""Measure queries, `ludic watch --totals` and a reader's first poll over many files that were never compacted.

    python -m benchmarks.many_files

20 workers write the files, 20 a version in stores of 4,000 and 40,000 files with one group of 8 each, and 750 a version
in a store of 15,000 files of 64 rollouts. Tokens are few, to save disk space: no contestant reads them. Plain DuckDB
queries the same files. Each call is a process of its own, whose imports are not timed; files are in the page cache.
CPU seconds are of the whole process, and show more than the time when the machine is busy.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import median

import duckdb

import ludic
from benchmarks.measure import in_a_process, median_ratio, print_table
from benchmarks.sql import by_sql, connect, plain_duckdb
from benchmarks.stores import GROUPS_A_FILE, make_store
from benchmarks.tail import COLUMNS
from ludic.app import collect_stats
from ludic.base import CACHE_VARIABLE
from ludic.root import Root
from ludic.root.rows import RolloutReader
from ludic.settings import run_script

FILES_A_VERSION = 20
PLAIN = "DuckDB without ludic: RLOO"


def main(quick: bool = False) -> None:
    """Print a table for each store.

    Args:
        quick: Use few files and one round, to check that the benchmark works.
    """
    stores, rounds = (((70, 2),), 1) if quick else (((4_000, 1), (40_000, 1), (15_000, GROUPS_A_FILE)), 3)
    for num_files, groups_a_file in stores:
        with tempfile.TemporaryDirectory() as folder:
            num_versions = num_files // FILES_A_VERSION if groups_a_file == 1 else 20
            make_store(
                f"{folder}/run", num_files, num_versions=num_versions, mean_length=20, groups_a_file=groups_a_file
            )
            print_times(f"{folder}/run", num_files, rounds)


def print_times(url: str, num_files: int, rounds: int) -> None:
    """Print the median times of all tasks, and their ratios to the query of plain DuckDB."""
    seconds: dict[str, list[float]] = {name: [] for name in TASKS}
    cpu: dict[str, list[float]] = {name: [] for name in TASKS}
    with tempfile.TemporaryDirectory() as cache:
        os.environ[CACHE_VARIABLE] = cache
        for _ in range(rounds):
            for name in TASKS:
                if "first" in name:
                    shutil.rmtree(f"{cache}/scalars", ignore_errors=True)
                wall_s, cpu_s = in_a_process(timed, name, url)
                seconds[name].append(wall_s)
                cpu[name].append(cpu_s)
    rows = [
        [
            name,
            *(f"{median(seconds[name]):.2f} s", f"{median_ratio(seconds[name], seconds[PLAIN]):.2g}x"),
            *(f"{median(cpu[name]):.2f} s", f"{median_ratio(cpu[name], cpu[PLAIN]):.2g}x"),
        ]
        for name in TASKS
    ]
    columns = ["", "time", "of DuckDB's RLOO", "CPU", "of DuckDB's RLOO"]
    print_table(f"many_files: {num_files:,} files of workers", columns, rows)


def timed(name: str, url: str) -> tuple[float, float]:
    """Return the wall and CPU seconds of a task."""
    root = Root.open(url)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    TASKS[name](root)
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def count(con: duckdb.DuckDBPyConnection) -> int:
    return con.sql("select count(*) from rollouts").fetchall()[0][0]


def poll(root: Root) -> int:
    """Return the number of rows that a reader without max_off_policy_steps delivers at its first poll."""
    rows = RolloutReader(root, COLUMNS).poll(None)
    return 0 if rows is None else rows.num_rows


TASKS: Mapping[str, Callable[[Root], object]] = {
    PLAIN: lambda root: by_sql(plain_duckdb(root)),
    "ludic: RLOO, the first time on a machine": lambda root: by_sql(connect(root)),
    "ludic: RLOO, later": lambda root: by_sql(connect(root)),
    "DuckDB without ludic: count(*)": lambda root: count(plain_duckdb(root)),
    "ludic: count(*), the first time on a machine": lambda root: count(ludic.connect(root)),
    "ludic: count(*), later": lambda root: count(ludic.connect(root)),
    "ludic watch --totals, later": collect_stats,
    "reader's first poll, all versions": poll,
}


if __name__ == "__main__":
    run_script(main, description=__doc__)
