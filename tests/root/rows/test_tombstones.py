"""What `expire` deletes, what it leaves behind, and what it must not touch."""

import json
from dataclasses import replace

import pytest

from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, SourceFile, list_files
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.root.rows.tombstones import (
    StoredFile,
    all_rows_match,
    expire,
    is_trained_on,
    is_unconsumed,
    read_tombstones,
    stored_files,
)
from ludic.root.rows.writer import RolloutWriter


@pytest.fixture
def filled(root: Root, next_batch) -> Root:
    """Two files of worker w0-a in each of versions 0 and 1, one of an import in version 0; two groups of two each."""
    for worker_id, versions in (("w0-a", (0, 0, 1, 1)), ("import-b", (0,))):
        with RolloutWriter(root, worker_id) as writer:
            for version in versions:
                writer.append(next_batch(worker_id, 2, policy_version=version))
                writer.flush()
    return root


def stored(name: str, *sources: tuple[str, int], version: int = 0) -> StoredFile:
    worker_id, _, sequence = name.rpartition("-")
    file = RolloutFile(version, "moar_cats", worker_id, int(sequence))
    return StoredFile(
        file=file, size_bytes=1, sources=tuple(SourceFile(*source) for source in sources or (file.source,))
    )


def of_version(root: Root, version: int) -> list[StoredFile]:
    return [found for found in stored_files(root) if found.file.version == version]


def test_files_are_deleted_and_a_tombstone_tells_of_them(filled):
    sizes = filled.sizes("rollouts")
    (expired,) = expire(filled, of_version(filled, 0), rule="--keep-versions 1")
    assert [file.name.rpartition("/")[2] for file in list_files(filled)] == ["w0-a-2.parquet", "w0-a-3.parquet"]
    (tombstone,) = read_tombstones(filled)
    assert tombstone.rule == "--keep-versions 1"
    (partition,) = tombstone.partitions
    assert json.loads(json.dumps(partition.files)) == {"import-b": [[0, 1]], "w0-a": [[0, 2]]}
    assert json.loads(json.dumps(partition.sources)) == {"import-b": [[0, 1]], "w0-a": [[0, 2]]}
    assert (partition.folder, partition.version, partition.env_name) == ("rollouts", 0, "moar_cats")
    assert (partition.num_files, partition.num_rows) == (3, 12) == (expired.num_files, expired.num_rows)
    deleted = [size_bytes for name, size_bytes in sizes.items() if "version=0" in name]
    assert partition.size_bytes == sum(deleted)
    # Requests 0 to 7 of four groups of two; those of the import are no part of the schedule.
    assert [tuple(pair) for pair in partition.groups] == [(0, 4)]


def test_a_dry_run_says_the_same_and_deletes_nothing(filled):
    names = filled.list("")
    would = expire(filled, of_version(filled, 0), rule="r", dry_run=True)
    assert filled.list("") == names
    assert would == expire(filled, of_version(filled, 0), rule="r")


def test_nothing_chosen_leaves_no_tombstone(filled):
    assert expire(filled, [], rule="r") == []
    assert read_tombstones(filled) == []


def test_compacted_files_expire_by_their_sources(filled):
    compact(filled, before_version=1)
    (file,) = of_version(filled, 0)
    assert set(file.sources) == {SourceFile("w0-a", 0), SourceFile("w0-a", 1), SourceFile("import-b", 0)}
    (partition,) = expire(filled, [file], rule="r")
    assert partition.files == {"compacted.0": [(0, 1)]}
    assert partition.sources == {"import-b": [(0, 1)], "w0-a": [(0, 2)]}
    assert (partition.num_rows, partition.groups) == (12, [(0, 4)])
    assert {file.version for file in list_files(filled)} == {1}


def test_each_expiry_has_a_tombstone_of_its_own(filled):
    for version in (0, 1):
        expire(filled, of_version(filled, version), rule=f"version {version}")
    assert filled.list("expired") == ["expired/0.json", "expired/1.json"]
    assert [tombstone.rule for tombstone in read_tombstones(filled)] == ["version 0", "version 1"]


def test_a_foreign_number_hides_no_tombstone(filled):
    filled.put(f"expired/{10**18 - 1}.json", b"{}")
    expire(filled, of_version(filled, 0), rule="r")
    assert [tombstone.rule for tombstone in read_tombstones(filled)] == ["r"]


def test_a_tombstone_that_was_stored_in_part_is_written_again(filled):
    filled.put("expired/0.json", b'{"created_at": "2026')
    expire(filled, of_version(filled, 0), rule="r")
    assert filled.list("expired") == ["expired/0.json", "expired/1.json"]
    assert [tombstone.rule for tombstone in read_tombstones(filled)] == ["r"]


def test_broken_files_expire_like_others(filled):
    name = of_version(filled, 1)[0].file.name
    filled.put(name, b"torn")
    (partition,) = expire(filled, of_version(filled, 1), rule="r")
    assert (partition.num_files, partition.num_rows) == (2, 4)
    assert {file.version for file in list_files(filled)} == {0}


def test_what_a_compaction_left_goes_with_its_compacted_file(filled):
    files = list_files(filled, range(1))
    data = [filled.read(file.name) for file in files]
    compact(filled, before_version=1)
    for file, content in zip(files, data, strict=True):
        filled.put(file.name, content)
    (compacted,) = of_version(filled, 0)
    assert compacted.file.is_compacted
    assert sorted(compacted.leftovers) == files
    (partition,) = expire(filled, [compacted], rule="r")
    assert (partition.num_files, partition.num_rows) == (1, 12)
    assert {file.version for file in list_files(filled)} == {1}


def test_evaluations_are_a_folder_of_their_own(filled, next_batch):
    with RolloutWriter(filled, "w9-e", folder="evals") as writer:
        writer.append(next_batch("w9-e"))
    (evaluation,) = stored_files(filled, "evals")
    (partition,) = expire(filled, [evaluation], rule="r")
    assert (partition.folder, partition.num_files) == ("evals", 1)
    assert len(list_files(filled)) == 5


def test_only_files_whose_rows_all_match_are_taken():
    files = [
        stored("w0-0"),
        stored("w0-1"),
        stored("compacted.0-0", ("w1", 0), ("w1", 1)),
        stored("w0-2"),
        stored("w0-3"),
    ]
    rows = {
        SourceFile("w0", 0): (4, 4),
        SourceFile("w0", 1): (4, 3),
        SourceFile("w1", 0): (2, 2),
        SourceFile("w1", 1): (2, 0),
        SourceFile("w0", 2): (4, 0),
    }
    # 3 rows of w0-1 and 2 of the compacted file match and stay; of w0-3 nothing is known.
    assert all_rows_match(files, rows) == ([files[0]], 5)
    rows[SourceFile("w1", 1)] = (2, 2)
    assert all_rows_match(files, rows) == ([files[0], files[2]], 3)


def test_a_trainer_still_wants_what_is_in_its_window_and_not_consumed():
    cursor = Cursor()
    cursor.consume("w0", 0, [], whole=True)
    cursor.consume("w0", 1, ["a"], whole=False)
    assert not is_unconsumed(stored("w0-0", version=5), 3, cursor)
    assert is_unconsumed(stored("w0-1", version=5), 3, cursor)
    assert not is_unconsumed(stored("w0-1", version=2), 3, cursor)
    assert is_unconsumed(stored("compacted.0-0", ("w0", 0), ("w0", 1), version=5), 5, cursor)


def test_what_was_trained_on_is_known_by_old_and_new_names():
    compacted = stored("compacted.0-0", ("w0", 0), ("w0", 1))
    assert is_trained_on(compacted, {stored("w0-1").file.name})
    assert is_trained_on(compacted, {compacted.file.name})
    assert not is_trained_on(compacted, {stored("w0-2").file.name})
    assert not is_trained_on(compacted, {replace(stored("w0-1").file, version=1).name})


def test_a_reader_passes_over_what_expired(filled):
    reader = RolloutReader(filled, [])
    reader.consume(reader.poll(range(1, 2)))
    expire(filled, of_version(filled, 0), rule="r")
    assert reader.poll(None) is None
