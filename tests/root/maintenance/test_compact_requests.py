"""`compact` on requests/: the same rows of the view in few files, whatever happened on the way."""

import io
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from filesystems import Fault, FaultyFileSystem, ProcessDied, SharedStorage
from fsspec.implementations.local import LocalFileSystem

import ludic
from ludic.records.rollout import EpisodeEnd, GroupEvent
from ludic.root.maintenance import compaction
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import SOURCES_KEY, read_partition_plans
from ludic.root.rows.parquet import DIGESTS_KEY, encode_plain
from ludic.root.rows.writer import RolloutWriter, encode_events
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
WORKERS = ("w0-a", "w1-b")
COMPACTED = "requests/compacted.0-0.parquet"

locally = pytest.mark.parametrize("root_url", ["local"], indirect=True)


def started(number: int, at: datetime = NOON) -> GroupEvent:
    return GroupEvent(
        event="started",
        group_id=f"group-{number:03}",
        group_number=number,
        env_name="moar_cats",
        env_example_id="prompt-1",
        group_size=2,
        policy_version=3,
        created_at=at + timedelta(seconds=number),
    )


def ended(number: int) -> GroupEvent:
    """The end of a group: one episode complete after 4 s, with its number of tokens, and one given up."""
    at = NOON + timedelta(seconds=number + 4)
    first = EpisodeEnd(group_index=0, outcome="complete", ended_at=at, policy_version=3, num_tokens=number)
    ends = (first, EpisodeEnd(group_index=1, outcome="given_up"))
    return replace(started(number), event="given_up", created_at=at, episodes=ends)


def put(root: Root, worker_id: str, sequence: int, *events: GroupEvent) -> bytes:
    data = encode_events(events, run_id=root.run_id, worker_id=worker_id)
    assert root.put_if_absent(f"requests/{worker_id}-{sequence}.parquet", data)
    return data


def put_files(root: Root) -> None:
    """Three files of each worker: starts, starts and ends, ends."""
    for index, worker_id in enumerate(WORKERS):
        first = 2 * index
        put(root, worker_id, 0, started(first + 1))
        put(root, worker_id, 1, started(first), ended(first + 1))
        put(root, worker_id, 2, ended(first))


def fill(root: Root) -> list[dict[str, Any]]:
    """Put the files; returns the rows of the view."""
    put_files(root)
    rows = view(root)
    assert [(row["group_number"], row["sampled_s"], row["num_tokens"]) for row in rows] == [
        (number, 4.0, number) for number in range(4)
    ]
    return rows


def view(root: Root) -> list[dict[str, Any]]:
    return ludic.open(root.url).sql("from requests order by group_number").to_dicts()


def footer(root: Root, name: str) -> pq.FileMetaData:
    return pq.ParquetFile(io.BytesIO(root.read(name))).metadata


def group_ids(root: Root) -> list[str]:
    """The group of each row of the compacted file."""
    return pq.read_table(io.BytesIO(root.read(COMPACTED)))["group_id"].to_pylist()


def findings(root: Root) -> set[tuple[str, str]]:
    return {(finding.check, finding.where) for finding in ludic.open(root.url).verify().findings}


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["local", "s3"], indirect=True)
def test_the_view_is_the_same_before_during_and_after(root: Root) -> None:
    rows = fill(root)
    sources = {name: root.read(name) for name in root.list("requests")}
    report = ludic.open(root.url).compact()
    (partition,) = report.partitions
    assert (partition.name, partition.num_files_before, partition.num_files_after) == ("requests", 6, 1)
    assert partition.size_bytes_after == len(root.read(COMPACTED)) < partition.size_bytes_before
    assert root.list("requests") == [COMPACTED]
    assert view(root) == rows
    metadata = footer(root, COMPACTED)
    assert sorted(map(tuple, json.loads(metadata.metadata[SOURCES_KEY]))) == [
        (worker_id, sequence) for worker_id in WORKERS for sequence in range(3)
    ]
    assert metadata.num_rows == 8
    assert group_ids(root) == [f"group-{number:03}" for number in range(4) for _ in range(2)]
    for name, data in sources.items():
        root.put(name, data)
    assert view(root) == rows
    checked = ludic.open(root.url).verify()
    assert (checked.findings, checked.notes[0].check) == ([], "unfinished")
    ludic.open(root.url).compact()
    assert (root.list("requests"), ludic.open(root.url).verify().notes) == ([COMPACTED], [])


@locally
def test_a_dry_run_counts_the_folder_and_changes_nothing(root: Root) -> None:
    fill(root)
    names = root.list("")
    (partition,) = ludic.open(root.url).compact(before=0, dry_run=True).partitions
    assert (partition.name, partition.num_files_before, partition.num_files_after) == ("requests", 6, 1)
    assert root.list("") == names


@locally
def test_a_dry_run_counts_each_output(root: Root) -> None:
    fill(root)
    target_bytes = max(root.sizes("requests").values()) + 1
    (would,) = compact(root, dry_run=True, target_bytes=target_bytes).partitions
    (did,) = compact(root, target_bytes=target_bytes).partitions
    assert did.num_files_after == would.num_files_after == len(root.list("requests")) == 3


@pytest.mark.slow
@locally
def test_a_worker_that_lives_goes_on_and_its_next_files_go_into_the_next_plan(root: Root) -> None:
    with RolloutWriter(root, "w0-a", flush_age_s=3600) as writer:
        for number in range(4):
            writer.append(None, [started(number)])
            writer.flush()
            if number == 1:
                ludic.open(root.url).compact()
    assert root.list("requests") == [COMPACTED, "requests/w0-a-2.parquet", "requests/w0-a-3.parquet"]
    ludic.open(root.url).compact()
    assert root.list("requests") == [COMPACTED, "requests/compacted.1-0.parquet"]
    assert [row["group_number"] for row in view(root)] == [0, 1, 2, 3]
    assert ludic.open(root.url).compact().partitions == []
    with ludic.connect(root.url) as con:
        found = con.sql("select name, worker_id, sequence from compactions order by all").fetchall()
    assert found == [
        *((COMPACTED, "w0-a", sequence) for sequence in (0, 1)),
        *(("requests/compacted.1-0.parquet", "w0-a", sequence) for sequence in (2, 3)),
    ]


@pytest.mark.slow
@locally
def test_a_file_that_its_worker_puts_again_after_a_lost_answer_is_deleted_again(root: Root) -> None:
    rows = fill(root)
    again = root.read("requests/w0-a-0.parquet")
    ludic.open(root.url).compact()
    root.put("requests/w0-a-0.parquet", again)
    assert view(root) == rows
    ludic.open(root.url).compact()
    assert root.list("requests") == [COMPACTED]


@locally
def test_broken_and_copied_files_are_left_alone_and_named(root: Root) -> None:
    fill(root)
    root.put("requests/w0-a-3.parquet", root.read("requests/w0-a-2.parquet")[:-5])
    root.put("requests/w2-c-0.parquet", root.read("requests/w0-a-2.parquet"))
    root.put("requests/foreign.parquet", b"foreign")
    skipped = ludic.open(root.url).compact().skipped
    assert [each.name for each in skipped] == ["requests/w0-a-3.parquet", "requests/w2-c-0.parquet"]
    assert skipped[1].reason == "it holds rows of another worker or sequence, so it is a copy under a wrong name"
    assert root.list("requests") == [COMPACTED, "requests/foreign.parquet", *(each.name for each in skipped)]


@pytest.mark.slow
@locally
def test_row_groups_and_buffers_bound_the_merge_of_many_files(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fill(root)
    monkeypatch.setattr(compaction, "_MOST_BYTES", 1)
    monkeypatch.setattr(compaction, "_INDEXED_AHEAD", 2)
    ludic.open(root.url).compact()
    assert footer(root, COMPACTED).num_row_groups == 8  # each row is more than the buffer holds
    assert view(root) == rows


# --- Verify, repair and expire ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A compacted run without findings, which nobody changes."""
    root = put_run(str(tmp_path_factory.mktemp("sound") / "run"), RunConfig(model="tiny-qwen2", env=("moar_cats",)))
    fill(root)
    ludic.open(root.url).compact()
    report = ludic.open(root.url).verify()
    assert (report.findings, report.notes) == ([], [])
    return root


@pytest.fixture
def compacted(sound: Root, tmp_path: Path) -> Root:
    """A copy of it."""
    return Root.open(str(shutil.copytree(sound.path, tmp_path / "run")))


def rewrite(root: Root, sources: list[tuple[str, int]]) -> None:
    """Write the compacted file with a footer that names other sources."""
    table = pq.read_table(io.BytesIO(root.read(COMPACTED)))
    metadata = {name: value for name, value in table.schema.metadata.items() if name != DIGESTS_KEY}
    metadata[SOURCES_KEY] = json.dumps(sources).encode()
    root.put(COMPACTED, encode_plain(table.replace_schema_metadata(metadata)))


@pytest.mark.slow
def test_a_footer_that_does_not_agree_with_the_rows_is_found(compacted: Root) -> None:
    rewrite(compacted, [("w0-a", sequence) for sequence in range(3)])
    (finding,) = ludic.open(compacted.url).verify().findings
    assert (finding.check, finding.where) == ("compaction", COMPACTED)
    assert finding.problem == "holds rows of requests/w1-b-*.parquet, which its footer does not name"
    rewrite(compacted, [(worker_id, sequence) for worker_id in (*WORKERS, "w2-c") for sequence in range(3)])
    problems = {finding.problem for finding in ludic.open(compacted.url).verify().findings}
    assert "holds no rows of requests/w2-c-*.parquet, which its footer names" in problems
    rewrite(compacted, [])
    assert ("compaction", COMPACTED) in findings(compacted)


@pytest.mark.slow
def test_each_copy_of_a_compacted_file_is_found(compacted: Root) -> None:
    found = {
        ("compaction", "requests/compacted.0-1.parquet"),  # no plan lists it
        ("misnamed", "requests/w0-a-9.parquet"),  # holds rows of another worker, too
        ("misnamed", "requests/compacted.parquet"),
        ("misnamed", "requests/folder/compacted.0-0.parquet"),
        ("unreadable", "rollouts/version=0/env=moar_cats/compacted.0-0.parquet"),  # of another table
    }
    for _, name in found:
        compacted.put(name, compacted.read(COMPACTED))
    all_findings = findings(compacted)
    assert found <= all_findings
    assert {where for _, where in all_findings} <= {COMPACTED, *(name for _, name in found)}


@pytest.mark.slow
def test_a_workers_file_under_the_name_of_a_compacted_one_is_unreadable(compacted: Root) -> None:
    put(compacted, "compacted.1", 0, started(9))
    assert findings(compacted) == {("unreadable", "requests/compacted.1-0.parquet")}


@pytest.mark.slow
def test_a_damaged_compacted_file_is_found_and_quarantined(compacted: Root) -> None:
    data = bytearray(compacted.read(COMPACTED))
    data[len(data) // 3] ^= 1
    compacted.put(COMPACTED, bytes(data))
    assert findings(compacted) == {("unreadable", COMPACTED)}
    report = ludic.open(compacted.url).verify(repair=True)
    assert ([finding.where for finding in report.repaired], report.findings) == ([COMPACTED], [])
    assert (compacted.list("requests"), view(compacted)) == ([], [])
    put(compacted, "w0-next", 0, started(0))
    put(compacted, "w0-next", 1, ended(0))
    ludic.open(compacted.url).compact()
    assert compacted.list("requests") == ["requests/compacted.1-0.parquet"]
    assert findings(compacted) == set()


@pytest.mark.slow
@locally
def test_a_source_of_an_output_that_was_damaged_before_it_was_deleted_goes_into_the_next_plan(root: Root) -> None:
    rows = fill(root)
    root.put(COMPACTED, b"PAR1 and no more")
    report = ludic.open(root.url).compact()
    assert [skipped.name for skipped in report.skipped] == [COMPACTED]
    assert root.list("requests") == [COMPACTED, "requests/compacted.1-0.parquet"]
    root.delete(COMPACTED)
    assert view(root) == rows


@pytest.mark.slow
@locally
def test_hostile_plans_plan_nothing(root: Root) -> None:
    rows = fill(root)
    outputs = [
        {"name": "requests/w0-a-0.parquet", "sources": [["w0-a", 1]]},
        {"name": "rollouts/version=0/env=a/compacted.0-0.parquet", "sources": [["w0-a", 0]]},
        {"name": "requests/../compacted.0-0.parquet", "sources": [["w0-a", 0]]},
        {"name": COMPACTED, "sources": [["../w0-a", 0]]},
    ]
    names = [f"compactions/requests/{number}.json" for number in range(len(outputs))]
    for name, output in zip(names, outputs, strict=True):
        root.put(name, json.dumps({"outputs": [output]}).encode())
    assert [plan.outputs for plan in read_partition_plans(root, "requests")] == [()] * 4
    assert {("compaction", name) for name in names} <= findings(root)
    ludic.open(root.url).compact()
    assert (root.list("requests"), view(root)) == (["requests/compacted.4-0.parquet"], rows)


@pytest.mark.slow
@locally
def test_a_compacted_file_expires_when_all_its_rows_are_old(root: Root) -> None:
    now = datetime.now(UTC)
    for name, days in (("old", (9, 8)), ("mixed", (8, 0))):
        for sequence, ago in enumerate(days):
            put(root, name, sequence, started(sequence, now - timedelta(days=ago)))
        ludic.open(root.url).compact()
    files = ludic.open(root.url).expire(folder="requests", older_than="7d").files
    assert list(files) == [COMPACTED]
    assert root.list("requests") == ["requests/compacted.1-0.parquet"]
    assert findings(root) == set()
    assert ludic.open(root.url).compact().partitions == []


# --- Crashes, and several compactors ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["memory"], indirect=True)
def test_a_crash_before_any_storage_call_loses_and_doubles_nothing(root_url: str, run_config: RunConfig) -> None:
    def as_of_one_run(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"run_id": "one", "root": "one"} for row in rows]

    rows = as_of_one_run(fill(put_run(root_url, run_config)))
    index, is_over = 0, False
    while not is_over:
        root = put_run(f"{root_url}-{index}", run_config)
        put_files(root)
        fs = FaultyFileSystem(SharedStorage(LocalFileSystem(auto_mkdir=True) if root.is_local else root.fs))
        fs.faults.extend([*[None] * index, Fault.DIE_BEFORE])
        with suppress(ProcessDied):
            compaction.compact(replace(root, fs=fs))
        is_over = not fs.is_dead
        assert as_of_one_run(view(root)) == rows, f"after a crash before call {index}"
        if index % 8 == 0:
            assert findings(root) == set()
        compaction.compact(root)
        assert root.list("requests") == [COMPACTED]
        if index % 8 == 0:
            assert as_of_one_run(view(root)) == rows
        assert group_ids(root) == [f"group-{number:03}" for number in range(4) for _ in range(2)]
        root.delete("")
        index += 1
    # A plan, an output and six deletions at least.
    assert index > 8


@pytest.mark.slow
@pytest.mark.parametrize("overtaken_in", ["_make", "_held", "_divide", "_read_indexes"])
@locally
def test_a_compactor_that_another_overtakes_anywhere_ends_well(
    root: Root, monkeypatch: pytest.MonkeyPatch, overtaken_in: str
) -> None:
    rows = fill(root)
    original: Callable[..., Any] = getattr(compaction._Partition, overtaken_in)

    def overtaken(partition: Any, *args: Any) -> Any:
        monkeypatch.setattr(compaction._Partition, overtaken_in, original)
        ludic.open(root.url).compact()
        return original(partition, *args)

    monkeypatch.setattr(compaction._Partition, overtaken_in, overtaken)
    assert ludic.open(root.url).compact().skipped == []
    assert (root.list("requests"), view(root)) == ([COMPACTED], rows)
    assert footer(root, COMPACTED).num_rows == 8


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_three_compactors_beside_a_worker_lose_and_double_nothing(root: Root) -> None:
    fill(root)
    barrier = threading.Barrier(4)

    def run(_: int) -> list[Any]:
        barrier.wait()
        return ludic.open(root.url).compact().skipped

    def work() -> None:
        with RolloutWriter(root, "w2-c") as writer:
            barrier.wait()
            for number in range(10, 20):
                writer.append(None, [started(number), ended(number)])
                writer.flush()

    with ThreadPoolExecutor(4) as pool:
        worker = pool.submit(work)
        assert list(pool.map(run, range(3))) == [[]] * 3
        worker.result()
    ludic.open(root.url).compact()
    assert [row["group_number"] for row in view(root)] == [*range(4), *range(10, 20)]
    assert sum(footer(root, name).num_rows for name in root.list("requests")) == 8 + 20
    assert findings(root) == set()
