"""Rows that the ledger names are found where compaction put them."""

import pyarrow as pa
import pytest

from ludic.errors import SchemaError, StoreError
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.ledger import read_rollouts
from ludic.root.rows.reader import RolloutReader

COLUMNS = ["response_tokens", "worker_id", "sequence", "messages"]
HINTS = ["rollout_id", "group_id", "file", "row_group", "row"]


@pytest.fixture
def planned(root: Root, put_file) -> tuple[pa.Table, pa.Table]:
    """Rows of three files as the ledger would name them, in an order of its own, and what they hold."""
    for sequence in range(3):
        put_file(root, "w0", sequence, num_groups=3)
    rows = RolloutReader(root, ["rollout_id"]).poll(None).select(HINTS).take([17, 3, 4, 12, 0, 9, 8])
    return rows, read_rollouts(root, rows, COLUMNS)


def name_of(rows: pa.Table, sequence: int) -> str:
    (name,) = {name for name in rows["file"].to_pylist() if name.endswith(f"w0-{sequence}.parquet")}
    return name


def test_rows_come_in_the_order_of_the_plan(planned):
    _, table = planned
    assert table.column_names == COLUMNS
    # 6 rows a file.
    assert table["sequence"].to_pylist() == [2, 0, 0, 2, 0, 1, 1]


def test_rows_are_the_same_after_a_compaction(root, planned):
    rows, table = planned
    compact(root)
    assert not {file.name for file in list_files(root)} & set(rows["file"].to_pylist())
    assert read_rollouts(root, rows, COLUMNS).equals(table)
    assert read_rollouts(root, rows.slice(2, 1), ["sequence"])["sequence"].to_pylist() == [0]


def test_rows_of_compacted_and_of_other_files_are_read_together(root, planned):
    rows, table = planned
    kept = root.read(name_of(rows, 1))
    compact(root)
    root.put(name_of(rows, 1), kept)
    assert read_rollouts(root, rows, COLUMNS).equals(table)


def test_a_file_that_is_gone_and_was_not_compacted_is_named(root, planned):
    rows, _ = planned
    root.delete(name_of(rows, 1))
    with pytest.raises(StoreError, match=r"w0-1\.parquet was planned for a step and is missing"):
        read_rollouts(root, rows, COLUMNS)


def test_a_replacement_that_is_gone_is_named(root, planned):
    rows, _ = planned
    compact(root)
    root.delete("rollouts")
    with pytest.raises(StoreError, match=r"compacted\.0-0\.parquet lacks rollouts that were planned"):
        read_rollouts(root, rows, COLUMNS)


def test_each_broken_file_is_told_of(root, planned):
    rows, _ = planned
    told = {}
    for sequence in (0, 2):
        root.put(name_of(rows, sequence), b"torn")
    with pytest.raises(SchemaError, match=r"w0-[02]\.parquet: not a Parquet file"):
        read_rollouts(root, rows, COLUMNS, on_broken=told.__setitem__)
    assert told.keys() == {name_of(rows, 0), name_of(rows, 2)}
    assert "not a Parquet file" in told[name_of(rows, 0)]


def test_a_broken_replacement_is_told_of_by_its_own_name(root, planned):
    rows, _ = planned
    compact(root)
    (compacted,) = list_files(root)
    root.put(compacted.name, b"torn")
    told = {}
    with pytest.raises(SchemaError):
        read_rollouts(root, rows, COLUMNS, on_broken=told.__setitem__)
    assert told.keys() == {compacted.name}
