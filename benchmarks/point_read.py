"""Measure reading one full rollout by its id, out of 100,000, in a new process: ludic, DuckDB and Lance.

    python -m benchmarks.point_read

Rollouts have about 1,000 response tokens and all columns. They are in files as workers write them (8 groups of 8 each,
20 versions), in the same files after `ludic compact`, and in a Lance dataset. Each read is a separate process, which
imports first and is timed from opening to a dict. Files are in the page cache.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from benchmarks.measure import in_a_process, print_table
from benchmarks.sql import plain_duckdb
from benchmarks.stores import compact_copy, make_store
from ludic.records import arrow_schema
from ludic.root import Root
from ludic.root.rows import find_rows, list_files, read_addresses, read_columns
from ludic.settings import run_script

Row = Mapping[str, Any]
Read = Callable[[str, int], Row]
"""Reads a rollout by its id and version."""

_FILES_AN_APPEND = 64


def main(quick: bool = False) -> None:
    """Print two tables.

    Args:
        quick: Use a small store and one round, to check that the benchmark works.
    """
    num_files, num_versions, mean_length, rounds = (8, 4, 20, 1) if quick else (1563, 20, 1000, 15)
    folder = Path(tempfile.mkdtemp())
    try:
        small = make_store(str(folder / "small"), num_files, num_versions=num_versions, mean_length=mean_length)
        compacted = compact_copy(small, str(folder / "compacted"))
        make_lance(small, str(folder / "lance"))
        make_lance(small, str(folder / "indexed")).create_scalar_index("rollout_id", "BTREE")
        reads: dict[str, Read] = {
            "ludic, workers' files, version known": partial(by_ludic, small.url, True),
            "ludic, workers' files": partial(by_ludic, small.url, False),
            "ludic, compacted, version known": partial(by_ludic, compacted.url, True),
            "ludic, compacted": partial(by_ludic, compacted.url, False),
            "DuckDB over the compacted files": partial(by_duckdb, compacted.url),
            "Lance, scalar index on rollout_id": partial(by_lance, str(folder / "indexed")),
            "Lance, scan": partial(by_lance, str(folder / "lance")),
        }
        ids = some_ids(small, rounds)
        print_reads(reads, ids, f"One rollout of {64 * num_files:,} by its id, {rounds} of them")
        print_commands({"workers' files": small, "compacted": compacted}, ids[: max(1, rounds // 3)])
    finally:
        shutil.rmtree(folder)


def make_lance(root: Root, path: str) -> lance.LanceDataset:
    """Write the same rows to a Lance dataset, in the order of the files."""
    names, files = arrow_schema("rollouts").names, list_files(root)
    for start in range(0, len(files), _FILES_AN_APPEND):
        tables = [read_columns(root, file.name, names) for file in files[start : start + _FILES_AN_APPEND]]
        reader = (batch for table in tables for batch in table.to_batches())
        lance.write_dataset(reader, path, schema=tables[0].schema, mode="append" if start else "create")
    return lance.dataset(path)


def some_ids(root: Root, count: int) -> list[tuple[str, int]]:
    """Return ids of rollouts from random files of the store, with their versions."""
    files = list_files(root)
    rng = np.random.default_rng(0)
    chosen = [files[index] for index in rng.integers(0, len(files), count)]
    columns = [read_columns(root, file.name, ["rollout_id"])["rollout_id"] for file in chosen]
    return [
        (column[int(rng.integers(len(column)))].as_py(), f.version) for column, f in zip(columns, chosen, strict=True)
    ]


def print_reads(reads: Mapping[str, Read], ids: list[tuple[str, int]], title: str) -> None:
    ms: dict[str, list[float]] = {name: [] for name in reads}
    for rollout_id, version in ids:
        for name, read in reads.items():
            # One read per process, which has opened and parsed no file before.
            ms[name].append(in_a_process(timed_ms, read, rollout_id, version))
    ours = median(next(iter(ms.values())))
    rows = [[name, f"{median(m):.0f} ms", f"{max(m):.0f} ms", f"{median(m) / ours:.2g}x"] for name, m in ms.items()]
    print_table(title, ["", "median", "worst", "of the first line"], rows)


def timed_ms(read: Read, rollout_id: str, version: int) -> float:
    """Return the milliseconds of a read in this process, after its imports."""
    # pyarrow imports pandas, if installed, when it first makes a datetime.
    pa.array([datetime.now(UTC)]).to_pylist()
    start = time.perf_counter()
    row = read(rollout_id, version)
    milliseconds = (time.perf_counter() - start) * 1e3
    assert row["rollout_id"] == rollout_id, row["rollout_id"]
    return milliseconds


def by_ludic(url: str, version_is_known: bool, rollout_id: str, version: int) -> Row:
    root = Root.open(url)
    addresses = find_rows(root, rollout_id, version if version_is_known else None)
    return read_addresses(root, addresses).to_pylist()[0]


def by_duckdb(url: str, rollout_id: str, version: int) -> Row:
    rows = plain_duckdb(Root.open(url)).execute("from rollouts where rollout_id = ?", [rollout_id])
    return dict(zip((column[0] for column in rows.description or ()), rows.fetchall()[0], strict=True))


def by_lance(path: str, rollout_id: str, version: int) -> Row:
    return lance.dataset(path).to_table(filter=f"rollout_id = '{rollout_id}'").to_pylist()[0]


def print_commands(roots: Mapping[str, Root], ids: list[tuple[str, int]]) -> None:
    """Print the time of `ludic view --text`, from the start of Python to its end."""
    rows = []
    for name, root in roots.items():
        seconds = []
        for rollout_id, _ in ids:
            start = time.perf_counter()
            command = [sys.executable, "-m", "ludic", "view", root.url, rollout_id]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
        rows.append([f"ludic view --text, {name}", f"{median(seconds):.2f} s"])
    print_table("The command, imports included", ["", "median"], rows)


if __name__ == "__main__":
    run_script(main, description=__doc__)
