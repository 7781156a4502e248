"""One row or one group by its id: found wherever it is, by statistics where there are some, without trust in clocks."""

import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from strategies import make_batch

from ludic.errors import StoreError
from ludic.records.conversion import to_table
from ludic.records.rollout import RolloutBatch
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, find_rows, list_files, read_addresses
from ludic.root.rows.parquet import encode
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


def put(root: Root, version: int, sequence: int, batch: RolloutBatch | None = None, folder: str = "rollouts"):
    """A file of two groups of four; its rows."""
    batch = batch or make_batch(seed=sequence, policy_version=version)
    table = to_table(batch, run_id=root.run_id, sequence=sequence)
    file = RolloutFile(version, "moar_cats", "worker-0", sequence, folder)
    assert root.put_if_absent(file.name, encode(table))
    return table


@pytest.mark.slow
@pytest.mark.parametrize("is_compacted", [False, True])
def test_every_row_and_every_group_is_found(root: Root, is_compacted: bool):
    # Ids are random here, so that no version can be guessed from them.
    tables = {
        (version, sequence): put(root, version, sequence)
        for version in range(5)
        for sequence in (2 * version, 2 * version + 1)
    }
    if is_compacted:
        compact(root)
        assert all(file.is_compacted for file in list_files(root))
    for (version, _), table in list(tables.items())[::3]:  # the first and the last among them
        for known in (version, None):
            row = table.slice(5, 1)
            found = find_rows(root, row["rollout_id"][0].as_py(), known)
            assert [address.file.version for address in found] == [version]
            assert read_addresses(root, found).to_pylist() == row.to_pylist()
            group = find_rows(root, row["group_id"][0].as_py(), known)
            assert read_addresses(root, group).to_pylist() == table.slice(4, 4).to_pylist()


def test_an_id_in_no_file_is_not_found(root: Root):
    assert find_rows(root, "nothing") == []
    table = put(root, 3, 0)
    assert find_rows(root, "nothing") == []
    assert find_rows(root, table["rollout_id"][0].as_py(), version=2) == []


def test_evals_are_looked_through_as_well(root: Root):
    table = put(root, 1, 0, folder="evals")
    (address,) = find_rows(root, table["rollout_id"][6].as_py())
    assert (address.file.folder, address.row) == ("evals", 6)


def test_a_broken_file_hides_no_other(root: Root):
    table = put(root, 1, 1)
    for sequence, torn in enumerate((b"", b"torn", encode(table)[:-30])):
        root.put(RolloutFile(1, "moar_cats", "a", sequence).name, torn)
    assert len(find_rows(root, table["group_id"][0].as_py())) == 4


def test_a_row_that_two_files_hold_during_a_compaction_is_found_once(root: Root):
    tables = {file_name(root, 0, sequence): put(root, 0, sequence) for sequence in range(2)}
    compact(root)
    for name, table in tables.items():
        root.put(name, encode(table))
        assert len(find_rows(root, table["rollout_id"][0].as_py())) == 1
        assert len(find_rows(root, table["group_id"][0].as_py())) == 4


def file_name(root: Root, version: int, sequence: int) -> str:
    return RolloutFile(version, "moar_cats", "worker-0", sequence).name


def test_statistics_spare_reading_ids(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Of 16 files whose ids count up, as uuid7 does, one is read beyond its footer."""
    root = put_run(str(tmp_path / "run"), RunConfig(model="tiny", env=("moar_cats",)))
    wanted = ""
    for sequence in range(16):
        table = to_table(make_batch(seed=sequence, policy_version=7), run_id=root.run_id, sequence=sequence)
        for name, ids in (("rollout_id", range(8)), ("group_id", [0] * 4 + [1] * 4)):
            index = table.schema.get_field_index(name)
            table = table.set_column(index, table.schema.field(index), [[f"{name}-{sequence:02}-{id_}" for id_ in ids]])
        assert root.put_if_absent(file_name(root, 7, sequence), encode(table))
        wanted = table["rollout_id"][3].as_py() if sequence == 11 else wanted
    read = []
    original = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_groups", lambda self, *a, **k: read.append(a) or original(self, *a, **k)
    )
    (address,) = find_rows(root, wanted, version=7)
    assert (address.file.sequence, address.row, len(read)) == (11, 3, 1)


def test_a_filesystem_that_fails_is_an_error_and_not_an_absence(tmp_path, monkeypatch: pytest.MonkeyPatch):
    class Failing(LocalFileSystem):
        cachable = False

        def open(self, path: str, *args, **kwargs):
            if "/rollouts/" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return super().open(path, *args, **kwargs)

    root = put_run(str(tmp_path / "run"), RunConfig(model="tiny", env=("moar_cats",)), fs=Failing())
    put(root, 0, 0)
    with pytest.raises(StoreError, match="worker-0-0"):
        find_rows(root, "nothing")
