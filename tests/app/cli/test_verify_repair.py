"""`ludic verify --repair`: what is broken is quarantined, what is needed stays, and nothing sound is called broken.

And what is no fault: compaction, expiry and whatever was cut short of them.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filesystems import Fault, FaultyFileSystem, SharedStorage
from fsspec.implementations.local import LocalFileSystem
from strategies import make_batch

from ludic.errors import StoreError
from ludic.records.conversion import to_table
from ludic.root.attempts import start_attempt
from ludic.root.maintenance.compaction import compact
from ludic.root.maintenance.verify import Finding, check_root
from ludic.root.root import Root
from ludic.root.rows.files import SOURCES_KEY, RolloutFile, list_files
from ludic.root.rows.parquet import DIGESTS_KEY, encode, open_writer
from ludic.root.rows.tombstones import expire, list_quarantined, stored_files
from ludic.root.rows.writer import RolloutWriter

pytestmark = pytest.mark.slow

LEDGER = "batches/attempt=1/step=1.parquet"


def open_root(path: Path) -> Root:
    return Root.open(str(path))


def checks(path: Path) -> set[str]:
    return {finding.check for finding in check_root(open_root(path)).findings}


def notes(path: Path) -> set[tuple[str, str]]:
    return {(note.check, note.where) for note in check_root(open_root(path)).notes}


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture
def torn(breakable: Path) -> list[str]:
    """Names of a file of rollouts and one of metrics that are torn."""
    names = [list_files(open_root(breakable))[0].name, open_root(breakable).list("metrics")[0]]
    for name in names:
        tear(breakable / name)
    return names


def test_broken_files_are_quarantined_and_the_next_look_finds_a_sound_run(ludic, breakable: Path, torn: list[str]):
    result = ludic("verify", breakable, "--repair", "--json")
    assert (result.code, result.err) == (0, "")
    printed = json.loads(result.out)
    assert (printed["sound"], printed["findings"]) == (True, [])
    assert sorted(repaired["where"] for repaired in printed["repaired"]) == sorted(torn)
    assert not any((breakable / name).exists() for name in torn)
    assert all((breakable / "quarantine" / name).exists() for name in torn)
    again = ludic("verify", breakable)
    assert again.code == 0
    assert again.out.startswith("note, quarantined: a broken file that was moved to quarantine/\n")
    assert again.out.endswith(f"{breakable} is sound\n")


def test_without_repair_nothing_is_moved(ludic, breakable: Path, torn: list[str]):
    assert ludic("verify", breakable).code == 1
    assert all((breakable / name).exists() for name in torn)


def test_broken_files_are_quarantined_on_every_filesystem(root_url: str, make_trained: Callable[[str], Root]):
    root = make_trained(root_url)
    name = list_files(root)[0].name
    root.put(name, root.read(name)[:-1])
    report = check_root(root, repair=True)
    assert ([finding.where for finding in report.repaired], report.findings) == ([name], [])
    assert [file.name for file in list_quarantined(root)] == [name]
    assert check_root(root).findings == []


def test_a_move_that_was_cut_short_is_finished(breakable: Path, torn: list[str]):
    # As on an object store, killed between copy and delete.
    for name in torn:
        target = breakable / "quarantine" / name
        target.parent.mkdir(parents=True)
        shutil.copy(breakable / name, target)
    assert check_root(open_root(breakable), repair=True).findings == []
    assert [file.name for file in list_quarantined(open_root(breakable))] == sorted(torn)


def test_the_ledger_of_a_step_that_counts_stays(ludic, breakable: Path):
    tear(breakable / LEDGER)
    result = ludic("verify", breakable, "--repair")
    assert result.code == 1
    assert (breakable / LEDGER).exists()
    assert "put a sound copy in its place, or move it away" in result.out


def test_the_ledger_of_a_superseded_step_is_quarantined(breakable: Path):
    tear(breakable / LEDGER)
    start_attempt(open_root(breakable), parent_attempt=1, parent_step=0)
    report = check_root(open_root(breakable), repair=True)
    assert ([finding.where for finding in report.repaired], report.findings) == ([LEDGER], [])


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")])
def test_a_ledger_stays_where_nobody_can_tell_whether_it_counts(breakable: Path, damage: Callable[[Path], object]):
    start_attempt(open_root(breakable), parent_attempt=1, parent_step=0)
    tear(breakable / LEDGER)
    damage(breakable / "attempts/1.json")
    assert check_root(open_root(breakable), repair=True).repaired == []
    assert (breakable / LEDGER).exists()


def test_a_file_of_a_newer_schema_is_named_and_stays(breakable: Path):
    name = list_files(open_root(breakable))[0].name
    table = pq.read_table(breakable / name, partitioning=None)
    newer = {**table.schema.metadata, b"ludic.schema_version": b"2.0"}
    del newer[DIGESTS_KEY]  # pyarrow writes no digests
    pq.write_table(table.replace_schema_metadata(newer), breakable / name)
    report = check_root(open_root(breakable), repair=True)
    assert ("newer_schema", name) in {(finding.check, finding.where) for finding in report.findings}
    assert report.repaired == []
    assert (breakable / name).exists()


@pytest.mark.parametrize("num_calls", [0, 7, 14, 21, 28, 35])
def test_a_file_that_can_not_be_reached_is_not_called_broken(
    breakable: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int
):
    """The connection breaks for good after some calls: in listings, in opening a file, amid its pages."""
    monkeypatch.setenv("LUDIC_RETRY_S", "0")
    fs = FaultyFileSystem(SharedStorage(LocalFileSystem()))
    root = Root.open(str(breakable), fs=fs)
    fs.faults.extend([None] * num_calls + [Fault.ERROR_BEFORE] * 10_000)
    with pytest.raises(StoreError):
        check_root(root, repair=True)
    assert not (breakable / "quarantine").exists()


def test_temporary_files_are_noted_and_deleted_after_a_day(breakable: Path):
    (breakable / ".tmp/ludic-old/deep").mkdir(parents=True)
    old, new = breakable / ".tmp/ludic-old", breakable / ".tmp/new"
    (old / "deep/model.safetensors").write_bytes(b"half")
    new.write_bytes(b"half")
    for path in (old / "deep/model.safetensors", old / "deep", old):
        day_ago = path.stat().st_mtime - 25 * 3600
        os.utime(path, (day_ago, day_ago))
    assert notes(breakable) == {("leftover", ".tmp/ludic-old"), ("leftover", ".tmp/new")}
    assert checks(breakable) == set()
    report = check_root(open_root(breakable), repair=True)
    assert [finding.where for finding in report.repaired] == [".tmp/ludic-old"]
    assert (old.exists(), new.exists()) == (False, True)


# --- Compaction and expiry -----------------------------------------------------------------------------------


@pytest.fixture
def compacted(breakable: Path) -> Path:
    """The run, with a compacted file of two sources in version 0 and what it replaced in a folder beside the run."""
    root = open_root(breakable)
    with RolloutWriter(root, "w1-test") as writer:
        writer.append(make_batch(worker_id="w1-test", num_groups=1, seed=7))
    shutil.copytree(breakable / "rollouts", breakable.parent / "before")
    compact(root, before_version=1)
    assert [file.is_compacted for file in list_files(root)] == [True, False]
    return breakable


COMPACTED = "rollouts/version=0/env=moar_cats/compacted.0-0.parquet"
SOURCES = [f"rollouts/version=0/env=moar_cats/{worker}-test-0.parquet" for worker in ("w0", "w1")]
PLAN = "compactions/rollouts/version=0/env=moar_cats/0.json"


def restore(path: Path, name: str) -> None:
    """Put back a file that compaction replaced."""
    shutil.copy(path.parent / "before" / name.removeprefix("rollouts/"), path / name)


def write_compacted(path: Path, sources: list[list], tables: list[pa.Table], name: str = COMPACTED) -> None:
    table = pa.concat_tables(tables)
    with open_writer(path / name, table.schema, {SOURCES_KEY: json.dumps(sources).encode()}) as writer:
        writer.write_table(table)


def read(path: Path) -> pa.Table:
    return pq.read_table(path, partitioning=None)


def test_a_compacted_run_is_sound(compacted: Path):
    report = check_root(open_root(compacted))
    assert (report.findings, report.notes) == ([], [])


def test_a_run_whose_versions_expired_is_sound(compacted: Path):
    root = open_root(compacted)
    expire(root, stored_files(root), rule="by hand")
    assert list_files(root) == []
    report = check_root(root)
    assert (report.findings, report.notes) == ([], [])


def test_a_broken_compacted_file_is_quarantined_and_its_sources_are_not_missed(compacted: Path):
    tear(compacted / COMPACTED)
    assert checks(compacted) == {"unreadable", "lost_rollouts", "lost_sources", "sequence_gaps"}
    report = check_root(open_root(compacted), repair=True)
    assert ([finding.where for finding in report.repaired], report.findings) == ([COMPACTED], [])


def test_a_compacted_file_that_vanished_is_a_loss(compacted: Path):
    (compacted / COMPACTED).unlink()
    assert checks(compacted) == {"lost_rollouts", "lost_sources", "sequence_gaps"}


@pytest.mark.parametrize(
    ("names", "without"), [(SOURCES, COMPACTED), (SOURCES, None), (SOURCES[:1], None)], ids=["begun", "made", "half"]
)
def test_a_compaction_that_was_cut_short_is_noted_and_ludic_compact_finishes_it(
    compacted: Path, names: list[str], without: str | None
):
    for name in names:
        restore(compacted, name)
    if without is not None:
        (compacted / without).unlink()
    assert checks(compacted) == set()
    assert notes(compacted) == {("unfinished", COMPACTED)}
    compact(open_root(compacted), before_version=1)
    assert (checks(compacted), notes(compacted)) == (set(), set())


def test_a_compacted_file_without_a_plan_is_found(compacted: Path):
    (compacted / PLAN).unlink()
    (finding,) = check_root(open_root(compacted)).findings
    assert finding == Finding(check="compaction", where=COMPACTED, problem="no plan in compactions/ lists it")


def test_a_plan_that_can_not_be_read_is_found(compacted: Path):
    (compacted / PLAN).write_text("{")
    findings = check_root(open_root(compacted)).findings
    assert {(finding.check, finding.where) for finding in findings} == {("compaction", COMPACTED), ("compaction", PLAN)}


def test_rows_of_a_source_that_the_footer_does_not_name_are_found(compacted: Path):
    tables = [read(compacted / COMPACTED)]
    write_compacted(compacted, [["w0-test", 0]], tables)
    (finding,) = check_root(open_root(compacted)).findings
    assert finding.problem == f"holds rows of {SOURCES[1]}, which its footer does not name"


def test_a_source_whose_rows_are_missing_is_found(compacted: Path):
    rows = read(compacted / COMPACTED)
    mine = rows.filter(pa.compute.equal(rows.column("worker_id"), "w0-test"))
    write_compacted(compacted, [["w0-test", 0], ["w1-test", 0]], [mine])
    findings = {finding.check: finding.problem for finding in check_root(open_root(compacted)).findings}
    assert findings["compaction"] == f"holds no rows of {SOURCES[1]}, which its footer names"
    assert set(findings) == {"compaction", "lost_sources"}


def test_a_source_in_two_compacted_files_is_found(compacted: Path):
    second = COMPACTED.replace("compacted.0-0", "compacted.0-1")
    shutil.copy(compacted / COMPACTED, compacted / second)
    plan = json.loads((compacted / PLAN).read_text())
    plan["outputs"].append(plan["outputs"][0] | {"name": second})
    (compacted / PLAN).write_text(json.dumps(plan))
    problems = [finding.problem for finding in check_root(open_root(compacted)).findings if finding.where == second]
    assert problems == [f"holds {source}, and so does {COMPACTED}" for source in SOURCES]


# --- Rows ----------------------------------------------------------------------------------------------------


def rows_of(path: Path, order: list[int] | None = None, **columns: list) -> pa.Table:
    """Two groups of two rows by a worker of their own; some columns replaced, and the rows in another order."""
    batch = make_batch(worker_id="w9", num_groups=2, group_size=2, seed=9)
    table = to_table(batch, run_id=open_root(path).run_id, sequence=0)
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, pa.field(name, table.schema.field(name).type), pa.array(values))
    return table if order is None else table.take(order)


def write_rows(path: Path, table: pa.Table) -> str:
    name = RolloutFile(0, "moar_cats", "w9", 0).name
    (path / name).write_bytes(encode(table))
    return name


def test_a_group_that_comes_again_after_another_one_is_found(breakable: Path):
    name = write_rows(breakable, rows_of(breakable, order=[0, 2, 1, 3]))
    (finding,) = check_root(open_root(breakable)).findings
    assert (finding.check, finding.where) == ("scattered_groups", name)


def test_a_null_where_none_is_allowed_makes_a_file_unreadable(breakable: Path):
    name = write_rows(breakable, rows_of(breakable, group_key=["a", None, "b", "b"]))
    found = {finding.where: finding.problem for finding in check_root(open_root(breakable)).findings}
    assert found[name] == "column 'group_key' has nulls, wanted none"
