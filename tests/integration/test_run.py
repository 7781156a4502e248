"""`ludic run`: what it starts it restarts, and what Ctrl-C left it goes on with."""

import re
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import psutil
import pytest
from forks import Forked, words_of
from tiny_runs import create_root

import ludic
from ludic.app.demos.words import open_demo
from ludic.root.attempts import newest_attempt_id
from ludic.root.catalogue import WORKERS
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.ledger import ledger_steps

numbers = count()
SETTINGS = ["--learning-rate", "0.003", "--checkpoint-every", "2"]


OWN = """\
import asyncio

from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message


class Waits:
    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="love cats"),))

    async def score(self, example, answer):
        await asyncio.sleep(0.3)
        return Score(reward=float(len(answer)))
"""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A run with steps of some tenths of a second, in most of which no processor works."""
    (tmp_path / "own.py").write_text(OWN)
    sizes = {"groups_per_batch": 4, "num_workers": 2, "max_tokens": 8, "accept_incomplete": True}
    model = open_demo(str(tmp_path / "demo")).record.model
    return create_root(str(tmp_path / "run"), model, env=(f"{tmp_path}/own.py:Waits",), **sizes)


def start(root: Root, *args: str) -> Forked:
    log = Path(f"{root.url}-{next(numbers)}")
    return Forked(["ludic", "run", root.url, *args], log, out=log.with_suffix(".out"))


def wait_until(condition: Callable[[], bool], process: Forked, limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def used_steps(root: Root) -> list[int]:
    query = "select step, count(distinct group_id) from batches where used group by step order by step"
    steps = ludic.connect(root).execute(query).fetchall()
    assert {groups for _, groups in steps} == {4}
    return [step for step, _ in steps]


def test_ctrl_c_stops_every_process_and_the_same_command_goes_on(root: Root) -> None:
    first = start(root, *SETTINGS, "--num-steps", "9")
    wait_until(lambda: len(ledger_steps(root, 1)) >= 4, first)
    children = psutil.Process(first.pid).children(recursive=True)
    assert len(children) == 6  # the start server, a trainer, and two workers with a guard each
    first.send_signal(signal.SIGINT)
    output, errors = first.communicate(timeout=60)
    assert first.returncode == 1
    assert errors.rstrip().endswith("ludic: interrupted")
    assert "Traceback" not in errors
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)

    # No flags: what is in the root says how it was started.
    second = start(root)
    output, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert "trained to step 9" in output
    assert newest_attempt_id(root) == 2
    assert used_steps(root) == list(range(1, 10))
    (twice,) = (
        ludic.connect(root)
        .execute("""
        select count(*) from (select group_id from batches group by group_id having count(distinct step) > 1)
    """)
        .fetchone()
    )
    assert twice == 0


def test_a_killed_worker_and_a_killed_trainer_are_started_again(root: Root) -> None:
    run = start(root, *SETTINGS, "--num-steps", "8")
    wait_until(lambda: len(ledger_steps(root, 1)) >= 3, run)
    children = psutil.Process(run.pid).children(recursive=True)
    by_command = {words_of(child)[4]: child for child in children if words_of(child)[2:4] == ["-m", "ludic"]}
    assert by_command.keys() == {"train", "worker"}
    for child in by_command.values():  # other users of the machine see the arguments
        assert words_of(child)[5:7] == [root.url, "--config"]
        assert len(words_of(child)) == 8
    by_command["worker"].kill()
    by_command["train"].kill()
    _, errors = run.communicate(timeout=150)
    assert run.returncode == 0, errors
    assert "trainer ended with -9; started again" in errors
    assert used_steps(root) == list(range(1, 9))
    assert len(WORKERS.listed(root)) >= 3, "the killed worker had no second life"


def test_a_second_run_is_refused_before_it_starts_anything_and_one_that_takes_over_ends_the_first(root: Root) -> None:
    first = start(root, *SETTINGS, "--num-steps", "500")
    wait_until(lambda: len(ledger_steps(root, 1)) >= 2, first)
    second = start(root)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 1
    refusal = r"ludic: .*: attempt 1 of .* trains here since .* renews its lease; stop it, or start with --take-over"
    assert re.match(refusal, errors.rstrip().splitlines()[-1])
    assert newest_attempt_id(root) == 1
    assert len({file.worker_id for file in list_files(root)}) == 2

    third = start(root, "--take-over")
    wait_until(lambda: len(ledger_steps(root, 2)) >= 2, third)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 1
    assert re.match(refusal.replace("attempt 1", "attempt 2"), errors.rstrip().splitlines()[-1])
    third.send_signal(signal.SIGINT)
    third.communicate(timeout=60)
    steps = used_steps(root)
    assert steps == list(range(1, len(steps) + 1))


def test_what_always_fails_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    root = open_demo(str(tmp_path / "run"))
    (Path(root.record.model) / "model.safetensors").write_bytes(b"half a file")
    broken = start(root, *SETTINGS, "--num-steps", "2")
    _, errors = broken.communicate(timeout=120)
    assert broken.returncode == 1
    last = errors.rstrip().splitlines()[-1]  # on a busy machine, a start takes too long to be called soon
    assert re.match("ludic: trainer died 3 times (soon after its start|with the same last words): ", last)
    assert "weights differ (model.safetensors)" in errors


def test_an_unknown_name_is_found_before_anything_starts(root: Root) -> None:
    refused = start(root, *SETTINGS, "--num-steps", "2", "--advantage", "rlo")
    _, errors = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert errors.startswith("ludic: advantage 'rlo' is unknown; did you mean 'rloo'?")
    assert newest_attempt_id(root) == 0
