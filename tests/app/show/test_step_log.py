"""What `ludic run` logs where there is no terminal: a line a step, and what is wrong."""

import logging
import os
import pty
import sys
from typing import Any

import pytest

from ludic.app.show.watch import Watcher, open_view, step_log
from ludic.root.root import Root
from ludic.root.rows.tables import MetricsLog, TableTail


def write_steps(root: Root, *steps: int) -> None:
    log = MetricsLog(root, "train", f"{steps[0]}")
    for step in steps:
        numbers = {
            "reward_mean": step / 4,
            "loss": 0.5,
            "off_policy_steps_mean": 1.0,
            "tokens_per_s": 1234.0,
            "grad_norm": 0.1,
        }
        log.write(attempt_id=1, step=step, policy_version=step, num_rollouts=8, **numbers)
    log.close()


def write_call(root: Root, name: str, **counts: Any) -> None:
    log = MetricsLog(root, "worker", name)
    sizes = {"env_name": "moar_cats", "policy_version": 0, "num_rollouts": 8, "num_groups": 2, "num_tokens": 64}
    log.write(worker_id=name, **sizes, **counts)
    log.close()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    """The lines that were logged since the last look."""
    caplog.set_level(logging.INFO)

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "ludic.run"]
        caplog.clear()
        return found

    return take


@pytest.fixture(autouse=True)
def lists_in_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail lists for a twentieth of the time, which on a busy machine is too rarely for these tests."""
    init = TableTail.__init__
    rarely = {"listing_share": 0.0}
    monkeypatch.setattr(TableTail, "__init__", lambda self, *args, **options: init(self, *args, **options | rarely))


def test_each_step_is_logged_once_and_none_from_before(started: Root, lines) -> None:
    write_steps(started, 1)
    write_call(started, "w0", num_incomplete_completions=6)
    with step_log(Watcher(started.url), interval_s=0) as update:
        write_steps(started, 2, 3)
        update()
        assert lines() == [
            "step 2  reward 0.500  loss 0.5000  off-policy steps 1.0  1,234 tokens/s  cut at max_tokens 75.0%",
            "step 3  reward 0.750  loss 0.5000  off-policy steps 1.0  1,234 tokens/s  cut at max_tokens 75.0%",
        ]
        write_steps(started, 4)
    assert [line[:6] for line in lines()] == ["step 4"]


def test_what_is_wrong_is_logged_at_once_and_not_again(started: Root, lines) -> None:
    failed = {"num_errors": 8, "first_error": "ValueError: reward is nan, wanted a finite float32"}
    told = f"since the start: every one of 8 rollouts failed in moar_cats; the first error: {failed['first_error']}"
    with step_log(Watcher(started.url), interval_s=0) as update:
        write_call(started, "w0", **failed)
        update()
        assert lines() == [told]
        write_call(started, "w1", **failed)
        update()
        assert lines() == []


def test_a_terminal_gets_the_panel_and_anything_else_the_log(started: Root, lines, monkeypatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        patched.setenv("TERM", "xterm")
        with open_view(Watcher(started.url)):
            write_steps(started, 1)
        panel = b""
        while b"reward" not in panel:
            panel += os.read(ours, 1 << 16)
    os.close(ours)
    assert lines() == []
    with open_view(Watcher(started.url)):
        write_steps(started, 2)
    assert [line[:6] for line in lines()] == ["step 2"]
