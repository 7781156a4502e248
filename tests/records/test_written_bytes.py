"""The same records give the same bytes: Parquet, ledger, run.json and exports, as they were recorded.

Each root is written as a worker, a trainer and a compaction write it, and the SHA-256 of each file is compared with
written_bytes.json. If what is written changes as wanted, record it again: tests/written_files.py says how.
"""

import json
import re
from pathlib import Path

import pytest
from written_files import GOLDEN, PROGRAMS, RECORDED, digests_of, digests_of_old, programs, roots

OLD = sorted(path.name for path in GOLDEN.glob("v1.*") if path.is_dir())
recorded = json.loads(RECORDED.read_text(encoding="utf-8"))


def test_the_digests_were_recorded_with_the_pinned_programs():
    """So a new pin is not forgotten, and the tests below are not skipped for ever."""
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    pinned = {program: re.search(rf"^{program}==(\S+)$", pins, re.MULTILINE)[1] for program in PROGRAMS}
    assert recorded["programs"] == pinned


@pytest.fixture(autouse=True)
def same_programs(request) -> None:
    if "tmp_path" in request.fixturenames and programs() != recorded["programs"]:
        pytest.skip(f"the bytes were recorded with {recorded['programs']}, installed are {programs()}")


@pytest.mark.parametrize("name", roots())
def test_the_same_records_give_the_same_bytes(name, tmp_path):
    assert digests_of(name, tmp_path) == recorded["digests"][name]


@pytest.mark.parametrize("name", OLD)
def test_a_root_of_an_older_ludic_is_gone_on_with_in_the_same_bytes(name, tmp_path):
    assert digests_of_old(name, tmp_path) == recorded["digests"][name]


def test_every_root_is_recorded():
    assert set(recorded["digests"]) == {*roots(), *OLD}
