"""A run whose root is moved away and made again: its processes end, and say why; the new run is untouched."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forked

from ludic.app.demos.words import open_demo
from ludic.root.attempts import start_attempt
from ludic.root.claims import claim_slot
from ludic.root.json_records import LatestPolicy
from ludic.root.root import Root
from ludic.root.rows.ledger import ledger_steps
from ludic.root.weights.policies import point_latest

SETTINGS = ["--learning-rate", "0.003", "--max-tokens-per-micro-batch", "512", "--lease-s", "3", "--num-steps", "1000"]


def wait_until(condition: Callable[[], bool], process: Forked, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def contents(root: Root) -> dict[str, bytes]:
    return {name: root.read(name) for name in root.list("") if not name.startswith((".tmp", "logs"))}


@pytest.mark.timeout(300)
def test_every_process_of_the_old_run_ends_and_leaves_the_new_one_as_it_is(tmp_path: Path) -> None:
    old = open_demo(str(tmp_path / "run"))
    run = Forked(["ludic", "run", old.url, *SETTINGS], tmp_path / "log")
    wait_until(lambda: len(ledger_steps(old, 1)) >= 3, run)
    Path(old.path).rename(tmp_path / "away")
    new = open_demo(str(tmp_path / "run"))
    start_attempt(new)
    claim_slot(new, 0, "w0-new")
    point_latest(new, LatestPolicy(version=0, budget=1))
    before = contents(new)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1, errors
    assert contents(new) == before
    assert errors.rstrip().splitlines()[-1].startswith(f"ludic: {old.url} was deleted and created again")
    assert "Traceback" not in errors
    logs = {log.stem: log.read_text() for log in (tmp_path / "away" / "logs").glob("*.log")}
    assert "was deleted" in logs["trainer"] + logs["worker-0"] + logs["worker-1"]
    assert not any("Traceback" in log for log in logs.values()), logs
