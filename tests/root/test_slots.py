"""Claims of slots: the newest life holds a slot, an earlier one notices, and nothing that is there is lost."""

import json
import re

import pytest

from ludic.errors import SchemaError, SlotTakenError
from ludic.root.catalogue import WORKERS
from ludic.root.claims import check_holds_slot, claim_slot, held_slot, is_over, newest_slot_claim


def test_lives_of_a_slot_count_up_and_the_newest_holds_it(root):
    first, second = claim_slot(root, 3, "w3-a"), claim_slot(root, 3, "w3-b")
    assert [WORKERS.name_of(first), WORKERS.name_of(second)] == ["workers/slot=3/1.json", "workers/slot=3/2.json"]
    check_holds_slot(root, second)
    taken = f"{root.url}: another worker took slot 3, {second.owner} at {second.created_at}; this one stops"
    with pytest.raises(SlotTakenError, match=re.escape(taken)):
        check_holds_slot(root, first)
    assert newest_slot_claim(root, 3) == second


def test_slots_are_claimed_apart(root):
    first, other = claim_slot(root, 0, "w0-a"), claim_slot(root, 1, "w1-a")
    check_holds_slot(root, first)
    check_holds_slot(root, other)
    assert newest_slot_claim(root, 2) is None


def test_a_listing_that_lags_takes_no_claim_from_anybody(unreliable_root):
    first, second = claim_slot(unreliable_root, 0, "w0-a"), claim_slot(unreliable_root, 0, "w0-b")
    unreliable_root.fs.shown = []
    third = claim_slot(unreliable_root, 0, "w0-c")
    assert (first.life, second.life, third.life) == (1, 2, 3)
    assert newest_slot_claim(unreliable_root, 0) == third


def test_files_that_are_no_claims_count_no_life(root):
    for stem in ("\N{SUPERSCRIPT TWO}", "007", "9" * 30, "note"):
        root.put(f"workers/slot=0/{stem}.json", b"{}")
    assert claim_slot(root, 0, "w0-a").life == 1


def test_a_claim_whose_answer_was_lost_is_one_claim(unreliable_root, monkeypatch):
    monkeypatch.setenv("LUDIC_RETRY_S", "5")
    unreliable_root.fs.failures_after = [ConnectionResetError("the answer was lost")]
    assert claim_slot(unreliable_root, 0, "w0-a").life == 1


def test_a_worker_that_ends_says_so_and_one_that_lives_does_not(root):
    with held_slot(root, 0, "w0-a") as claim:
        assert not is_over(WORKERS.read(root, 0, 1))
        check_holds_slot(root, claim)
    assert is_over(WORKERS.read(root, 0, 1))


def test_a_worker_that_fails_has_ended_too(root):
    with pytest.raises(KeyError), held_slot(root, 0, "w0-a"):
        raise KeyError
    assert is_over(WORKERS.read(root, 0, 1))


def test_a_worker_whose_process_is_no_more_is_over(root):
    claim = claim_slot(root, 0, "w0-a")
    values = json.loads(root.read(WORKERS.name_of(claim)))
    boot, namespace, _, start = values["process"].split()
    root.put(
        WORKERS.name_of(claim), json.dumps(values | {"process": f"{boot} {namespace} {2**22 + 1} {start}"}).encode()
    )
    assert is_over(WORKERS.read(root, 0, 1))


def test_a_claim_of_a_newer_ludic_is_read(root):
    claim = claim_slot(root, 0, "w0-a")
    values = json.loads(root.read(WORKERS.name_of(claim)))
    root.put(WORKERS.name_of(claim), json.dumps(values | {"colour": "red"}).encode())
    assert WORKERS.read(root, 0, 1) == claim


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"slot": "0"}', b"null", b"\xff"])
def test_a_claim_that_is_none_is_explained(root, data):
    root.put("workers/slot=0/1.json", data)
    with pytest.raises(SchemaError, match=r"workers/slot=0/1\.json is no claim .*stop the workers of this slot"):
        newest_slot_claim(root, 0)
