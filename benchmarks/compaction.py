"""Measure the cost and gain of compaction, of the number of rows in a row group, and of indexes.

    python -m benchmarks.compaction

Measures one version of a run with 64 workers, in files of 8 groups of 8 rollouts. Rows repeat a few batches of
realistic shape (benchmarks.rollouts) under new ids. Contestants take turns; each read opens its file again, which is
in the page cache.
"""

import itertools
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import print_table, take_turns
from benchmarks.rollouts import make_batch
from ludic.records import new_id, to_table
from ludic.root import Root
from ludic.root.maintenance import ROW_GROUP_ROWS, compact
from ludic.root.rows import RolloutFile, encode, group_ranges, list_files, open_writer, row_group_bounds, writer_options
from ludic.run import RunConfig, put_run
from ludic.settings import run_script

NUM_WORKERS = 64
ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = ["response_tokens", "response_logprobs"]

_SCAN = "select avg(episode_reward), avg(response_length), max(created_at) from read_parquet(?)"
_ADVANTAGES = """
select sum(advantage)
from (
    select episode_reward - (sum(episode_reward) over g - episode_reward) / (count(*) over g - 1) as advantage
    from read_parquet(?)
    window g as (partition by group_id)
)
"""


def main(quick: bool = False) -> None:
    """Print three tables.

    Args:
        quick: Use a few small files and one round, to check that the benchmark works.
    """
    num_files, mean_length, rounds = (8, 20, 1) if quick else (512, 1000, 7)
    folder = Path(tempfile.mkdtemp())
    try:
        root = put_run(str(folder / "run"), RunConfig(model="m", env=("moar_cats",)))
        for number, table in enumerate(make_tables(root, num_files, mean_length)):
            file = RolloutFile(7, "moar_cats", table["worker_id"][0].as_py(), table["sequence"][0].as_py())
            assert root.put_if_absent(file.name, encode(table)), number
        print_compaction(root, rounds)
        print_row_groups(root, folder, rounds)
        print_indexes(root, folder, rounds)
    finally:
        shutil.rmtree(folder)


def make_tables(root: Root, num_files: int, mean_length: int) -> Iterator[pa.Table]:
    """Yield the rows of each file, in order of time."""
    pool = [
        to_table(make_batch(8, mean_length=mean_length, seed=seed), run_id=root.run_id, sequence=0) for seed in range(4)
    ]
    for number, table in zip(range(num_files), itertools.cycle(pool), strict=False):
        groups = [new_id() for _ in range(8) for _ in range(1)]
        columns = {
            "group_id": [group for group in groups for _ in range(8)],
            "rollout_id": (ids := [new_id() for _ in range(table.num_rows)]),
            "trajectory_id": ids,
            "episode_id": [new_id() for _ in range(table.num_rows)],
            "worker_id": [f"w{number % NUM_WORKERS}-benchmark"] * table.num_rows,
            "sequence": [number // NUM_WORKERS] * table.num_rows,
        }
        for name, values in columns.items():
            index = table.schema.get_field_index(name)
            field = table.schema.field(index)
            table = table.set_column(index, field, pa.array(values, field.type))
        yield table


def print_compaction(root: Root, rounds: int) -> None:
    before = measure_reads(files_of(root), rounds)
    num_files, size_bytes = len(list_files(root)), sum(root.sizes("rollouts").values())
    started = time.perf_counter()
    compact(root)
    seconds = time.perf_counter() - started
    after = measure_reads(files_of(root), rounds)
    title = f"compaction: {num_files:,} files, {size_bytes / 1e6:,.0f} MB, in {seconds:.1f} s"
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows = [
        ["before", f"{num_files:,}", f"{size_bytes / 1e6:,.1f}", *before],
        ["after", f"{len(list_files(root)):,}", f"{sum(root.sizes('rollouts').values()) / 1e6:,.1f}", *after],
    ]
    print_table(f"{title}; peak memory {rss / 1e6:,.0f} MB", ["", "files", "MB", *READS], rows)


def print_row_groups(root: Root, folder: Path, rounds: int) -> None:
    """Rewrite the same rows with row groups of increasing size, and print their size and read times."""
    table = pq.read_table(files_of(root)[0])
    rows = []
    for num_rows in ROWS:
        path = folder / f"{num_rows}.parquet"
        with open_writer(path, table.schema) as writer:
            for start, stop in row_group_bounds(table, max_rows=num_rows):
                writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)
        size_mb = path.stat().st_size / 1e6
        rows.append([f"{num_rows:,}", f"{size_mb:,.1f}", *measure_reads([str(path)], rounds)])
    print_table(f"row groups: {table.num_rows:,} rows in one file", ["rows a row group", "MB", *READS], rows)


def print_indexes(root: Root, folder: Path, rounds: int) -> None:
    """Print the time to find a row with each of Parquet's indexes, which DuckDB uses, on compaction's row groups."""
    table = pq.read_table(files_of(root)[0])
    mixed = table.take(np.random.default_rng(0).permutation(table.num_rows))
    filters = {name: {"ndv": ROW_GROUP_ROWS, "fpp": 0.01} for name in ("group_id", "rollout_id")}
    files = {
        "sorted, statistics (ludic)": _write(folder, table),
        "sorted, statistics, page index": _write(folder, table, write_page_index=True),
        "sorted, statistics, bloom filters": _write(folder, table, bloom_filter_options=filters),
        "rows in any order, statistics": _write(folder, mixed),
        "rows in any order, statistics, bloom filters": _write(folder, mixed, bloom_filter_options=filters),
    }
    con, rollout_id = duckdb.connect(), table["rollout_id"][table.num_rows // 2].as_py()
    group_id = table["group_id"][table.num_rows // 2].as_py()
    calls = {
        f"{name}: {column}": partial(_find, con, file, column, value)
        for name, file in files.items()
        for column, value in {"rollout_id": rollout_id, "group_id": group_id}.items()
    }
    seconds = take_turns(calls, rounds)
    rows = [
        [name, f"{file.stat().st_size / 1e6:,.1f}"]
        + [f"{1000 * median(seconds[f'{name}: {column}']):,.1f}" for column in ("rollout_id", "group_id")]
        for name, file in files.items()
    ]
    print_table("indexes: a row by its id, through DuckDB", ["", "MB", "one rollout, ms", "one group, ms"], rows)


def _write(folder: Path, table: pa.Table, **options: Any) -> Path:
    path = folder / f"{new_id()}.parquet"
    with pq.ParquetWriter(path, table.schema, **writer_options(table.schema, dictionaries=True), **options) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
    return path


def _find(con: duckdb.DuckDBPyConnection, file: Path, column: str, value: str) -> None:
    assert con.execute(f"from read_parquet(?) where {column} = ?", [str(file), value]).fetchall()


def files_of(root: Root) -> list[str]:
    return [root.at(file.name) for file in list_files(root)]


READS = ("scan, ms", "RLOO, ms", "one group, ms", "one rollout, ms")


def measure_reads(files: Sequence[str], rounds: int) -> list[str]:
    """Return the median time of each of READS; the file of the group is known, as from the ledger."""
    file = files[len(files) // 2]
    ids = pq.read_table(file, columns=["group_id", "rollout_id"])
    wanted = ids.slice(ids.num_rows // 2, 1).to_pylist()[0]
    con = duckdb.connect()
    contestants: dict[str, Callable[[], object]] = {
        "scan": lambda: con.execute(_SCAN, [list(files)]).fetchall(),
        "rloo": lambda: con.execute(_ADVANTAGES, [list(files)]).fetchall(),
        "group": partial(read_rows_of, file, wanted["group_id"], TOKENS),
        "rollout": partial(read_rows_of, file, wanted["group_id"], None),
    }
    return [f"{1000 * median(seconds):,.1f}" for seconds in take_turns(contestants, rounds).values()]


def read_rows_of(file: str, group_id: str, columns: list[str] | None) -> pa.Table:
    """Read the row groups that may hold a group."""
    with pq.ParquetFile(file, pre_buffer=True) as parquet:
        ranges = group_ranges(parquet)
        row_groups = [
            n for n, (low, high) in enumerate(ranges) if low <= group_id and (high is None or group_id <= high)
        ]
        return parquet.read_row_groups(row_groups, columns=columns, use_threads=False)


if __name__ == "__main__":
    run_script(main, description=__doc__)
