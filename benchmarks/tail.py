"""Measure the time from a commit to its rows at a reader, by the number of existing files: ludic, Delta Lake and Lance.

    python -m benchmarks.tail

ludic's reader lists the versions that a trainer still uses, here the newest 4 with 16 files each; all other files are
in older versions. It reads the columns that a planner needs. The readers of table formats have no such window: they
load the commits since their last poll, and read the same columns of the new file. All but the newest files are hard
links (ludic) or log entries (Delta, Lance): no contestant opens them.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import lance
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction
from lance.fragment import write_fragments

from benchmarks.measure import median_ratio, print_table, take_turns
from benchmarks.rollouts import make_batch, make_like
from ludic.records import RolloutBatch, to_table
from ludic.root import Root
from ludic.root.rows import RolloutFile, RolloutReader, RolloutWriter, encode
from ludic.root.sql import BatchRules, Planner
from ludic.run import RunConfig, put_run
from ludic.settings import run_script

COLUMNS = Planner(BatchRules(groups_per_batch=8)).columns
GROUP_SIZE = 8
NEWEST_VERSION = 5000
WINDOW = range(NEWEST_VERSION - 3, NEWEST_VERSION + 1)
FILES_IN_WINDOW = 16
"""Files of each version in the window."""
FILES_BEFORE = 100
"""Files of each older version."""
# ext4 allows 65,000 hard links to a file.
_LINKS_OF_ONE = 10_000


@dataclass(frozen=True, slots=True)
class Tail:
    """A table with a writer, and a reader that has seen all existing rows."""

    commit: Callable[[], object]
    """Commits one more group."""
    poll: Callable[[], int]
    """Reads the new rows, and returns their number."""


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use few files and one round, to check that the benchmark works.
    """
    sizes, rounds = ((100, 200), 1) if quick else ((100, 10_000, 100_000), 40)
    rows: list[list[str]] = []
    first: dict[str, list[float]] = {}
    for num_files in sizes:
        with tempfile.TemporaryDirectory() as folder:
            tails = {name: start(folder, num_files) for name, start in TAILS.items()}
            idle = take_turns({name: tail.poll for name, tail in tails.items()}, rounds, twice=True)
            new = _deliver(tails, rounds)
        first = first or idle
        rows += [_row(num_files, name, idle, new, first) for name in tails]
    columns = ["files there", "", "poll, none new", "of the first", "ludic's of it", "commit to rows", "ludic's of it"]
    print_table("Time of a poll that finds nothing, and of one that delivers a group (medians)", columns, rows)


def _deliver(tails: Mapping[str, Tail], rounds: int) -> dict[str, list[float]]:
    """Return the seconds from a commit to its rows, (rounds,) by contestant."""
    seconds: dict[str, list[float]] = {name: [] for name in tails}
    for _ in range(rounds):
        for name, tail in tails.items():
            tail.commit()
            start = time.perf_counter()
            num_rows = tail.poll()
            seconds[name].append(time.perf_counter() - start)
            assert num_rows == GROUP_SIZE, f"{name} delivered {num_rows} rows"
    return seconds


def _row(
    num_files: int,
    name: str,
    idle: Mapping[str, Sequence[float]],
    new: Mapping[str, Sequence[float]],
    first: Mapping[str, Sequence[float]],
) -> list[str]:
    return [
        f"{num_files:,}",
        name,
        f"{median(idle[name]) * 1e3:.2f} ms",
        f"{median(idle[name]) / median(first[name]):.2f}x",
        f"{median_ratio(idle['ludic'], idle[name]):.2f}x",
        f"{median(new[name]) * 1e3:.2f} ms",
        f"{median_ratio(new['ludic'], new[name]):.2f}x",
    ]


def start_ludic(folder: str, num_files: int) -> Tail:
    root = put_run(f"{folder}/run", RunConfig(model="none", env=("moar_cats",)))
    _fill(root, num_files)
    reader = RolloutReader(root, COLUMNS)
    writer, groups = RolloutWriter(root, "w0-new"), _groups()

    def commit() -> None:
        writer.append(next(groups))
        writer.flush()

    def poll() -> int:
        rows = reader.poll(WINDOW)
        return 0 if rows is None else rows.num_rows

    poll()
    return Tail(commit, poll)


def _fill(root: Root, num_files: int) -> None:
    """Create files with valid names; files are hard links to the same rows."""
    data = encode(to_table(make_batch(1, group_size=GROUP_SIZE), run_id=root.run_id, sequence=0))
    in_window = [(version, number) for version in WINDOW for number in range(FILES_IN_WINDOW)]
    for index in range(num_files):
        before = divmod(index - len(in_window), FILES_BEFORE)
        version, number = in_window[index] if index < len(in_window) else (WINDOW.start - 1 - before[0], before[1])
        name = RolloutFile(version, "moar_cats", "w0-old", version * FILES_BEFORE + number).name
        if index % _LINKS_OF_ONE == 0:
            root.put_if_absent(name, data)
            original = Path(root.at(name))
        else:
            target = Path(root.at(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(original, target)


def start_delta(folder: str, num_files: int) -> Tail:
    url, groups = f"{folder}/delta", _groups()
    schema = to_table(next(groups), run_id="none", sequence=0).schema
    DeltaTable.create(url, schema)
    old = [_added(index) for index in range(num_files)]
    writer = DeltaTable(url)
    writer.create_write_transaction(old, "append", schema)
    writer.create_checkpoint()
    reader = DeltaTable(url)

    def poll() -> int:
        known = reader.version()
        reader.update_incremental()
        # Read the commit's log entry, which is cheaper than delta-rs's list of all files.
        entries = (
            json.loads(line)
            for version in range(known + 1, reader.version() + 1)
            for line in Path(f"{url}/_delta_log/{version:020}.json").read_text().splitlines()
        )
        paths = [entry["add"]["path"] for entry in entries if "add" in entry]
        return sum(pq.read_table(f"{url}/{path}", columns=COLUMNS).num_rows for path in paths)

    def commit() -> None:
        write_deltalake(writer, to_table(next(groups), run_id="none", sequence=0), mode="append")

    return Tail(commit, poll)


def _added(index: int) -> AddAction:
    """Return the log entry of a file that no contestant opens."""
    return AddAction(
        path=f"old-{index}.parquet",
        size=70_000,
        partition_values={},
        modification_time=0,
        data_change=True,
        stats=json.dumps({"numRecords": GROUP_SIZE}),
    )


def start_lance(folder: str, num_files: int) -> Tail:
    url, groups = f"{folder}/lance", _groups()
    table = to_table(next(groups), run_id="none", sequence=0)
    lance.write_dataset(table.slice(0, 0), url)
    old = write_fragments(table, url, schema=table.schema)
    lance.LanceDataset.commit(url, lance.LanceOperation.Append(list(old) * num_files), read_version=1)
    reader = lance.dataset(url)
    next_fragment = num_files

    def poll() -> int:
        nonlocal next_fragment
        reader.checkout_latest()
        num_rows = 0
        while (fragment := reader.get_fragment(next_fragment)) is not None:
            num_rows += fragment.to_table(columns=COLUMNS).num_rows
            next_fragment += 1
        return num_rows

    def commit() -> None:
        lance.write_dataset(to_table(next(groups), run_id="none", sequence=0), url, mode="append")

    return Tail(commit, poll)


def _groups() -> Iterator[RolloutBatch]:
    group = make_batch(1, group_size=GROUP_SIZE)
    for number in count():
        yield make_like(group, "w0-new", f"new-{number}", policy_version=NEWEST_VERSION)


TAILS = {"ludic": start_ludic, "Delta Lake": start_delta, "Lance": start_lance}


if __name__ == "__main__":
    run_script(main, description=__doc__)
