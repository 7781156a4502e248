"""`ludic verify` on each kind of file of the catalogue: missing, damaged, misnamed, foreign, and of a newer ludic.

The cases follow from the rows of the catalogue. So a new kind of file is tested without another line, unless a
missing file of it is to be named: MISSED says so.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bit_flips import flipped, is_named
from every_kind import KINDS, a_name, make_full_root, names_of

from ludic.errors import LudicError
from ludic.records.tables import arrow_schema
from ludic.root.catalogue import FILE_KINDS, FileKind, Records, Table, WeightFiles
from ludic.root.json_records import decode_json, encode_json
from ludic.root.maintenance.verify import Finding, check_root
from ludic.root.maintenance.verify.tables import check_file
from ludic.root.root import Root
from ludic.root.rows.parquet import DIGESTS_KEY

by_kind = pytest.mark.parametrize("row", KINDS, ids=lambda row: row.kind)
TABLES = [row for row in KINDS if isinstance(row, Table)]
RECORDS = [row for row in KINDS if isinstance(row, Records)]
MANIFEST = "policies/version=0/digests.json"
UNCHECKED = ("readme", "quarantined", "old quarantined")
"""Texts for people, and files that are broken already."""

DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "short of some bytes": lambda content: content[:-9],
    "zeroed": lambda content: bytes(len(content)),
    "emptied": lambda content: b"",
    "with a tail": lambda content: content + b"tail",
    "of another kind": lambda content: b"no such file at all",
}

MISSED = {
    "rollouts": "lost_rollouts",
    "batches": "checkpoint",
    "weights": "policy",
    "weight files": "policy",
    "state files": "checkpoint",
    "model": "model",
    "texts": "code",
    "compactions": "compaction",
    "attempts": "unknown_attempts",
    "prompts": "call",
    "episodes": "unclaimed_calls",
    "run": "no run",
}
"""Kinds of which verify misses a file, and the check that tells of it. A file of any other kind may be deleted."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return make_full_root(tmp_path_factory.mktemp("full"))


@pytest.fixture
def copy(root: Root, tmp_path: Path) -> Root:
    return Root.open(str(shutil.copytree(root.path, tmp_path / "copy")))


@pytest.fixture
def changed(root: Root) -> Iterator[Callable[[str, bytes | None], None]]:
    """changed(name, content): what a file is until the end of the test; None deletes it."""
    before: dict[Path, bytes | None] = {}

    def change(name: str, content: bytes | None) -> None:
        path = Path(root.path, name)
        before.setdefault(path, path.read_bytes() if path.exists() else None)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a policy and a checkpoint may share a file of the disk
        if content is not None:
            path.write_bytes(content)

    yield change
    for path, content in before.items():
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)


def said(root: Root) -> list[Finding]:
    """What verify finds; a run that can't be opened is one finding."""
    try:
        return check_root(Root.open(root.url)).findings
    except LudicError as error:
        return [Finding(check="no run", where="run.json", problem=str(error))]


def tells_of(finding: Finding, name: str) -> bool:
    """Whether a finding is of this file, or of its folder and names the file there."""
    folder, _, last = name.rpartition("/")
    return finding.where == name or (finding.where == folder and last in finding.problem)


def test_a_root_with_a_file_of_every_kind_is_sound(root: Root) -> None:
    assert {row.kind for row in KINDS if not names_of(root, row)} == set()
    assert said(root) == []


# --- Missing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MISSED)
def test_a_missing_file_that_others_need_is_missed(root: Root, changed: Callable, kind: str) -> None:
    for name in names_of(root, next(row for row in KINDS if row.kind == kind)):
        changed(name, None)
    assert MISSED[kind] in {finding.check for finding in said(root)}


def test_a_missing_file_that_no_other_needs_is_not_missed(copy: Root) -> None:
    for row in KINDS:
        if row.kind not in MISSED:
            copy.delete(names_of(copy, row)[-1])
    assert said(copy) == []


# --- Damaged -----------------------------------------------------------------------------------------------------


@by_kind
def test_a_damaged_file_is_named(root: Root, changed: Callable, row: FileKind[Any]) -> None:
    damages = itertools.cycle(DAMAGES.items())
    for name in names_of(root, row):
        assert not is_named(root, name)
        content = Path(root.path, name).read_bytes()
        # Weights are many files, all read again for each look.
        for damage, damaged in itertools.islice(damages, 2 if isinstance(row, WeightFiles) else len(DAMAGES)):
            if damaged(content) != content:
                changed(name, damaged(content))
                assert is_named(root, name) == (row.kind not in UNCHECKED), (name, damage)
        changed(name, content)


@pytest.mark.parametrize("name", [*(row.kind for row in RECORDS), MANIFEST])
def test_a_flipped_bit_of_a_record_is_named(root: Root, name: str) -> None:
    name = name if name == MANIFEST else names_of(root, next(row for row in RECORDS if row.kind == name))[0]
    size = Path(root.at(name)).stat().st_size
    for byte in {0, size // 3, size // 2, max(0, size - 30), max(0, size - 10), size - 2}:
        with flipped(Path(root.at(name)), 8 * byte + byte % 7):
            assert is_named(root, name), (name, byte)


def test_one_look_names_all_that_is_damaged_and_checks_the_rest(copy: Root) -> None:
    # Without the first two the rest is not looked at, or not all of it; SQL checks read the notes of quarantine.
    left_out = (*UNCHECKED, "run", "identity", "quarantine", "old quarantine")
    names = [names_of(copy, row)[-1] for row in KINDS if row.kind not in left_out]
    for name in names:
        path = Path(copy.path, name)
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
    found = said(copy)
    assert [name for name in names if not any(tells_of(finding, name) for finding in found)] == []
    assert [finding for finding in found if "can't be checked" in finding.problem] == []


@pytest.mark.parametrize("row", RECORDS, ids=lambda row: row.kind)
def test_a_record_without_its_values_is_named(root: Root, changed: Callable, row: Records[Any, Any]) -> None:
    name = names_of(root, row)[0]
    changed(name, json.dumps({"a": 1}).encode())
    assert is_named(root, name)


# --- Misnamed ----------------------------------------------------------------------------------------------------


def fields_inside(row: FileKind[Any]) -> set[str]:
    """Fields of the name that the file holds, too: as columns or as fields of the record."""
    if isinstance(row, Table):
        columns = set(arrow_schema(row.table).names) | ({"version"} if row.table == "rollouts" else set())
        return columns & set(row.fields._fields)
    if isinstance(row, Records):
        return {each.name for each in dataclasses.fields(row.record)} & set(row.fields._fields)
    return set()


@pytest.mark.parametrize(
    ("row", "field"),
    [(row, field) for row in KINDS for field in row.fields._fields if field in fields_inside(row)],
    ids=lambda value: getattr(value, "kind", value),
)
def test_a_file_under_the_name_of_another_is_named(
    root: Root, changed: Callable, row: FileKind[Any], field: str
) -> None:
    """Another value of one field of the name."""
    name = next(name for name in names_of(root, row) if "compacted." not in name)
    of = row.parse(name)
    value = getattr(a_name(row), field)
    other = row.name(
        of._replace(**{field: value if value != getattr(of, field) else getattr(a_name(row, field), field)})
    )
    content = Path(root.path, name).read_bytes()
    changed(other, content)
    assert is_named(root, other), other
    changed(other, None)
    assert not is_named(root, name)


# --- Foreign -----------------------------------------------------------------------------------------------------

FOLDERS = sorted({row.folder for row in KINDS if row.folder and not row.rest} | {"batches/attempt=1"})


def test_a_foreign_file_in_any_folder_is_named(copy: Root) -> None:
    takes_any = {row.folder for row in FILE_KINDS if row.rest and row.template == f"{row.folder}/{{file}}"}
    takes_any |= {row.folder for row in KINDS if row.fields._fields == ("name",)}
    names = {folder: f"{folder}/notes of mine.txt" for folder in FOLDERS}
    for name in names.values():
        Path(copy.path, name).write_bytes(b"see there")
    found = {finding.where: finding.check for finding in said(copy)}
    assert found == {name: "misnamed" for folder, name in names.items() if folder not in takes_any}


def test_what_lies_beside_the_runs_folders_is_nobodys_business(copy: Root) -> None:
    for name in ("reward.png", "notes/today.md", "logs/worker.log", "tensorboard/events.1", "iceberg/x.db"):
        copy.put(name, b"mine")
    assert said(copy) == []


def test_what_lies_at_the_top_and_is_no_kind_of_the_catalogue_is_noted(copy: Root) -> None:
    for row in FILE_KINDS:
        if row.folder:
            Path(copy.path, row.folder).mkdir(exist_ok=True)
    for name in ("reward.png", ".DS_Store", "notes/today.md", "notes/then.md", "run.json.bak", "LATEST"):
        copy.put(name, b"mine")
    report = check_root(copy)
    assert report.findings == []
    strays = sorted(note.where for note in report.notes if note.check == "stray")
    assert strays == ["LATEST", "notes", "run.json.bak"]


# --- Newer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLES, ids=lambda row: row.kind)
def test_a_table_of_a_newer_schema_is_named_as_that(root: Root, changed: Callable, row: Table[Any]) -> None:
    name = names_of(root, row)[0]
    table = pq.read_table(Path(root.path, name), partitioning=None)
    newer = {**table.schema.metadata, b"ludic.schema_version": b"99.0"}
    newer.pop(DIGESTS_KEY, None)  # pyarrow writes no digests
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(newer), sink)
    changed(name, sink.getvalue().to_pybytes())
    (finding,) = check_file(root, name).findings
    assert (finding.check, "99.0" in finding.problem) == ("newer_schema", True)


@pytest.mark.parametrize("row", [row for row in RECORDS if row.kind != "run"], ids=lambda row: row.kind)
def test_a_record_with_values_of_a_newer_ludic_is_read(root: Root, changed: Callable, row: Records[Any, Any]) -> None:
    name = names_of(root, row)[0]
    values = decode_json(root.read(name))
    changed(name, encode_json(values | {"a_new_value": {"of": ["a", "newer", "ludic"]}}))
    assert not is_named(root, name)
