"""Several compactors at once: all end well, and every row is there once."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from ludic.root.maintenance import compaction
from ludic.root.maintenance.compaction import CompactionReport, compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns


def stored(root: Root) -> Counter[str]:
    """group_ids of all rows of all files."""
    files = [read_columns(root, file.name, ["group_id"]) for file in list_files(root)]
    return Counter(group_id for rows in files for group_id in rows["group_id"].to_pylist())


locally = pytest.mark.parametrize("root_url", ["local"], indirect=True)
"""Compactors meet in the calls of a root; those that truly run at once meet on every storage."""


@locally
@pytest.mark.parametrize("overtaken_in", ["_make", "_held", "_divide", "_read_indexes"])
def test_a_compactor_that_another_overtakes_anywhere_ends_well(
    root: Root, put_file, monkeypatch: pytest.MonkeyPatch, overtaken_in: str
) -> None:
    groups = [group for sequence in range(4) for group in put_file(root, "w0", sequence)]
    original = getattr(compaction._Partition, overtaken_in)

    def overtaken(partition, *args):
        monkeypatch.setattr(compaction._Partition, overtaken_in, original)
        assert compact(root).partitions[0].num_files_before == 4
        return original(partition, *args)

    monkeypatch.setattr(compaction._Partition, overtaken_in, overtaken)
    report = compact(root)
    assert (report.skipped, [partition.num_files_after for partition in report.partitions]) == ([], [1])
    assert [file.is_compacted for file in list_files(root)] == [True]
    assert stored(root) == Counter(groups * 2)


@locally
def test_a_source_that_vanishes_while_it_is_merged_is_no_error(
    root: Root, put_file, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group for sequence in range(4) for group in put_file(root, "w0", sequence)]
    write_merged = compaction.write_merged

    def overtaken(*args):
        monkeypatch.setattr(compaction, "write_merged", write_merged)
        compact(root)
        write_merged(*args)

    monkeypatch.setattr(compaction, "write_merged", overtaken)
    assert compact(root).skipped == []
    assert stored(root) == Counter(groups * 2)


@pytest.mark.slow
def test_three_compactors_that_begin_together_all_end_well(root: Root, put_file) -> None:
    groups = [
        group
        for version in range(4)
        for worker_id in ("w0", "w1")
        for sequence in range(3)
        for group in put_file(root, worker_id, sequence, version=version)
    ]
    barrier = threading.Barrier(3)

    def run(_: int) -> CompactionReport:
        barrier.wait()
        return compact(root)

    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(run, range(3)))
    assert [report.skipped for report in reports] == [[]] * 3
    assert [file.is_compacted for file in list_files(root)] == [True] * 4
    assert stored(root) == Counter(groups * 2)
