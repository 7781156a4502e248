"""`ludic verify` on each kind of record of the catalogue: damaged, misnamed, of a newer ludic; and on foreign names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bit_flips import flipped, is_named
from tiny_runs import make_whole_root

import ludic
from ludic.store import Root
from ludic.store.catalogue import (
    CODE,
    CUT,
    EVALUATORS,
    IMPORTED,
    IMPORTS,
    OLD_QUARANTINE,
    OLD_QUARANTINED,
    ROWS,
    ImportName,
    MovedName,
    NumberName,
    Records,
    UuidName,
)
from ludic.store.evaluations import evaluation_of, put_evaluation
from ludic.store.records import (
    CutRecord,
    Evaluator,
    ImportBegun,
    ImportReport,
    QuarantinedFile,
    decode_json,
    encode_json,
    encode_record,
)

RECORDS = [row for row in ROWS if isinstance(row, Records)]
MANIFEST = "policies/version=0/digests.json"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    root = make_whole_root(tmp_path_factory.mktemp("whole"))
    put_evaluation(root, evaluation_of("moar_cats", {"max_steps": 1}, []))
    running = Evaluator(owner="host-1", process=None, blocks=["evals/version=1/env=moar_cats/e-0.parquet"])
    root.put(EVALUATORS.name(UuidName("01929292-0000-7000-8000-000000000001")), encode_record(running))
    root.put(CUT.template, encode_record(CutRecord(step=2, first_step=1)))
    how = {"format": "jsonl", "code_sha256": None, "env_name": "x", "tokenizer": "t", "file": "x"}
    import_name = ImportName("0123456789abcdef")
    root.put(IMPORTS.name(import_name), encode_record(ImportBegun(**how, created_at="2026-01-01T00:00:00+00:00")))
    numbers = dict.fromkeys(("num_records", "num_groups", "num_rollouts", "num_without_logprobs", "num_unscored"), 0)
    report = ImportReport(file="x", worker_id="import-0", **numbers, kept_as_metadata={}, not_kept={}, refused=[])
    root.put(IMPORTED.name(import_name), encode_record(report))
    root.put(CODE.name(NumberName(1)), encode_json({"files": {}}))
    moved = MovedName("metrics/train-1-0.parquet")
    root.put(OLD_QUARANTINED.name(moved), b"broken")
    note = QuarantinedFile(name=moved.name, reason="broken", found_at="2026-01-01T00:00:00+00:00")
    root.put(OLD_QUARANTINE.name(moved), encode_record(note))
    return root


def name_in(root: Root, row: Records[Any, Any]) -> str:
    return min(name for name in root.list("") if row.parse(name) is not None)


def findings(root: Root, name: str) -> set[tuple[str, str]]:
    return {(each.check, each.problem) for each in ludic.open(root.url).verify().findings if each.where == name}


@pytest.fixture
def kept(root: Root) -> Iterator[Root]:
    """The root, whose files are as before after the test."""
    before = {name: root.read(name) for name in root.list("")}
    yield root
    for name in root.list(""):
        if name not in before:
            root.delete(name)
    for name, data in before.items():
        root.put(name, data)


@pytest.mark.parametrize("name", [*(row.kind for row in RECORDS), MANIFEST])
def test_a_flipped_bit_is_named(root: Root, name: str) -> None:
    name = name if name == MANIFEST else name_in(root, next(row for row in RECORDS if row.kind == name))
    size = Path(root.at(name)).stat().st_size
    assert not is_named(root, name)
    for byte in (0, size // 3, size // 2, size - 30, size - 10, size - 2):
        with flipped(Path(root.at(name)), 8 * byte + byte % 7):
            assert is_named(root, name), (name, byte)


@pytest.mark.parametrize("row", RECORDS, ids=lambda row: row.kind)
def test_a_record_without_its_values_is_named_and_one_of_a_newer_ludic_is_not(
    kept: Root, row: Records[Any, Any]
) -> None:
    name = name_in(kept, row)
    values = decode_json(kept.read(name))
    kept.put(name, encode_json(values | {"a_new_value": {"of": ["a", "newer", "ludic"]}}))
    if row.kind != "run":  # whose settings are all known
        assert not is_named(kept, name)
    kept.put(name, json.dumps({"a": 1}).encode())
    # A run without its settings can't be opened; of all others verify tells every finding.
    assert (
        is_named(kept, name) if row.kind == "run" else findings(kept, name) or findings(kept, name.rpartition("/")[0])
    )


OTHERS = {
    "attempts": "attempts/9.json",
    "leases": "attempts/9.lease",
    "workers": "workers/slot=7/1.json",
    "policies": "policies/version=9/policy.json",
    "evaluations": "evaluations/0123456789abcdef.json",
    "quarantine": "quarantine/rollouts/version=0/env=x/w-0.parquet.json",
}
"""Another name of each kind whose record says in which file it is."""


@pytest.mark.parametrize("kind", OTHERS)
def test_a_record_in_the_file_of_another_is_named(kept: Root, kind: str) -> None:
    name = name_in(kept, next(row for row in RECORDS if row.kind == kind))
    kept.put(OTHERS[kind], kept.read(name))
    assert findings(kept, OTHERS[kind]) == {("misnamed", f"holds the record of {name}")}


@pytest.mark.parametrize(
    "folder", sorted({row.folder for row in ROWS if row.folder and not row.rest} | {"batches/attempt=1"})
)
def test_a_foreign_name_in_any_folder_is_named(kept: Root, folder: str) -> None:
    name = f"{folder}/notes of mine.txt"
    kept.put(name, b"see there")
    rest = {row.folder for row in ROWS if row.rest and row.template == f"{row.folder}/{{file}}"}
    moved = {"quarantine", "set_aside"}
    wanted = set() if folder in rest | moved else {"misnamed"}
    assert {check for check, _ in findings(kept, name)} == wanted


def test_views_leave_out_damaged_records_and_verify_says_all_the_rest(kept: Root) -> None:
    kept.put("attempts/1.json", b'{"attempt_id": 1')
    found = ludic.open(kept.url).verify().findings
    assert [each.where for each in found if each.check == "attempt"] == ["attempts/1.json"]
    assert not [each for each in found if "can't be checked" in each.problem]


def test_what_lies_beside_the_runs_folders_is_nobodys_business(kept: Root) -> None:
    for name in ("reward.png", "notes/today.md", "logs/worker.log", "tensorboard/events.1", "iceberg/x.db"):
        kept.put(name, b"mine")
    names = {each.where for each in ludic.open(kept.url).verify().findings}
    assert not {"reward.png", "notes/today.md", "logs/worker.log", "tensorboard/events.1", "iceberg/x.db"} & names
