"""Broken files are quarantined with their reason, on every filesystem, whatever was done before."""

import json

import pytest

from ludic.app.show.stats import collect_stats
from ludic.root.maintenance.verify import check_root, quarantine_broken
from ludic.root.root import Root
from ludic.root.rows.tombstones import list_quarantined, quarantine
from ludic.root.sql.connection import connect

NAME = "rollouts/version=0/env=moar_cats/w0-3.parquet"


@pytest.fixture
def broken(root: Root) -> Root:
    root.put(NAME, b"torn")
    return root


def test_a_file_that_is_quarantined_is_out_of_sight_and_keeps_its_content_and_the_reason(broken: Root):
    assert quarantine(broken, NAME, "cut off") == f"quarantine/{NAME}"
    assert not broken.exists(NAME)
    assert broken.read(f"quarantine/{NAME}") == b"torn"
    (found,) = list_quarantined(broken)
    assert (found.name, found.reason, found.found_at[:2]) == (NAME, "cut off", "20")


def test_quarantining_twice_changes_nothing(broken: Root):
    quarantine(broken, NAME, "cut off")
    before = list_quarantined(broken)
    assert quarantine(broken, NAME, "another reason") == f"quarantine/{NAME}"
    assert list_quarantined(broken) == before


def test_a_move_that_was_cut_short_is_finished_by_the_next(broken: Root):
    # Killed between copy and delete, as on an object store: the file is under both names.
    broken.put(f"quarantine/{NAME}.json", b"{half a no")
    broken.put(f"quarantine/{NAME}", b"torn")
    quarantine(broken, NAME, "cut off")
    assert not broken.exists(NAME)
    assert [found.reason for found in list_quarantined(broken)] == ["cut off"]


def test_a_note_without_its_file_is_not_listed(root: Root):
    root.put(f"quarantine/{NAME}.json", b"{}")
    assert list_quarantined(root) == []


def test_a_file_without_its_note_is_listed_without_a_reason(root: Root):
    root.put(f"quarantine/{NAME}", b"torn")
    assert [(found.name, found.reason) for found in list_quarantined(root)] == [(NAME, "")]


def test_a_file_that_is_not_there_is_left_alone(root: Root):
    assert quarantine(root, NAME, "cut off") is None
    assert root.list("quarantine") == []


@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_a_repair_names_a_file_that_was_deleted_since_the_check(broken: Root):
    findings = check_root(broken).findings
    broken.delete(NAME)
    repaired, remaining = quarantine_broken(broken, findings)
    assert remaining == []
    assert [(found.where, found.problem.endswith("; it was deleted since")) for found in repaired] == [(NAME, True)]


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_what_older_versions_left_in_set_aside_is_still_listed(root: Root):
    root.put(f"set_aside/{NAME}", b"torn")
    note = {"name": NAME, "reason": "cut off", "found_at": "2026-11-01T00:00:00+00:00"}
    root.put(f"set_aside/{NAME}.json", json.dumps(note).encode())
    newer = NAME.replace("w0-3", "w0-4")
    root.put(newer, b"torn")
    quarantine(root, newer, "no footer")
    assert [(file.name, file.reason) for file in list_quarantined(root)] == [(NAME, "cut off"), (newer, "no footer")]
    assert [note.where for note in check_root(root).notes if note.check == "quarantined"] == [NAME, newer]
    assert collect_stats(root).facts["quarantined"][0]["reason"] == "cut off"
    assert connect(root).sql("select name, reason from quarantine order by name").fetchall() == [
        (NAME, "cut off"),
        (newer, "no footer"),
    ]
