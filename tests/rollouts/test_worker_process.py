"""`python -m ludic worker` as a process of its own, stopped politely and not."""

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.compute as pc
import pytest
from forks import Forked
from tiny_models import committed_rows, forward_logprobs, publish

from ludic.app.launch.process import SUPERVISED
from ludic.errors import SlotTakenError
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.tables import MetricsTail
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

pytestmark = pytest.mark.slow


@contextmanager
def worker_process(root: Root, *options: str) -> Iterator[Forked]:
    """A worker in slot 0, killed at the end if it still runs."""
    log = Path(root.path).with_name(f"{uuid.uuid4()}.log")
    process = Forked(["ludic", "worker", root.url, "--slot", "0", "--device", "cpu", *options], log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(process: Forked, holds: Callable[[], bool]) -> None:
    while not holds():
        assert process.poll() is None, process.printed()
        time.sleep(0.005)


def group_numbers(root: Root) -> list[int]:
    """Of every group in the store, in order; a group that is there twice is listed twice."""
    rows = committed_rows(root, "group_id", "group_size")
    return sorted({row["group_id"]: row["request_index"] // row["group_size"] for row in rows}.values())


def stop(process: Forked) -> int:
    """Ask it to stop; returns how many groups it says to have committed."""
    process.terminate()
    assert process.wait() == 0, process.printed()
    return int(re.search(r"^(\d+) groups committed to ", process.printed(), re.MULTILINE)[1])


@pytest.fixture
def root(tmp_path: Path, run_config: Callable[..., RunConfig], folder: str) -> Root:
    """Two environments, so that each call of the engine makes two files."""
    root = create_root(str(tmp_path / "run"), run_config(env=("addition", "opposites")))
    publish(root, folder, budget=10**6)
    return root


def test_on_sigterm_all_that_was_sampled_is_committed(root: Root, folder: str) -> None:
    with worker_process(root) as process:
        wait_until(process, lambda: len(group_numbers(root)) >= 16)
        said = stop(process)
    numbers = group_numbers(root)
    # An earlier number may have been given up while a later one was complete.
    assert len(set(numbers)) == len(numbers) == said
    assert said == sum(row["num_groups"] for row in MetricsTail(root).poll())
    for row in committed_rows(root, "prompt_tokens", "response_tokens", "response_logprobs")[:8]:
        expected = forward_logprobs(folder, row["prompt_tokens"], row["response_tokens"])
        assert row["response_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_a_supervised_worker_stops_when_the_process_that_started_it_is_gone(root: Root) -> None:
    command = [sys.executable, "-m", "ludic", "worker", root.url, "--slot", "0", "--device", "cpu"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"OMP_NUM_THREADS": "1", SUPERVISED: "1"}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as process:
        while len(group_numbers(root)) < 8:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.stdin.close()
        assert process.wait() == 0, process.stderr.read()
        said = int(process.stdout.read().split()[0])
    # Without those that were given up.
    numbers = group_numbers(root)
    assert len(set(numbers)) == len(numbers) == said


def test_a_worker_on_a_folder_without_a_run_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ludic", "worker", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert (
        ended.stderr
        == f"ludic: {tmp_path} holds no run: run.json is missing; `ludic run` or `ludic.record` starts one\n"
    )


def test_workers_killed_at_random_moments_lose_nothing_that_they_had_committed_and_repeat_nothing(root: Root) -> None:
    chance = random.Random(0)
    for life in range(5):
        num_files = len(list_files(root))
        with worker_process(root, "--in-flight", "8") as process:
            # Every fourth life is killed while it starts, the others among their commits.
            if life % 4:
                wait_until(process, lambda before=num_files: len(list_files(root)) > before)
            time.sleep(chance.uniform(0, 0.5))
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        # committed_rows reads every file whole: none is broken.
        numbers = group_numbers(root)
        assert len(set(numbers)) == len(numbers)
    gaps = set(range(max(numbers) + 1)) - set(numbers)
    with worker_process(root, "--num-groups", str(len(gaps) + 1)) as process:
        assert process.wait() == 0, process.printed()
    assert group_numbers(root) == list(range(max(numbers) + 2))


def test_a_worker_that_was_stopped_and_replaced_ends_and_no_request_is_delivered_twice(root: Root) -> None:
    with worker_process(root, "--in-flight", "8") as first:
        wait_until(first, lambda: bool(list_files(root)))
        first.send_signal(signal.SIGSTOP)
        with worker_process(root, "--num-groups", "12", "--in-flight", "8") as second:
            assert second.wait() == 0, second.printed()
        first.send_signal(signal.SIGCONT)
        assert first.wait() == SlotTakenError.exit_code
        (last,) = first.printed().splitlines()[-1:]
    assert re.fullmatch(rf"ludic: {root.url}: another worker took slot 0, .*-{second.pid} at .*; this one stops", last)
    rows = RolloutReader(root, []).poll(None)
    delivered = rows.filter(pc.is_null(rows["refusal"]))
    requests = sorted(delivered["request_index"].to_pylist())
    assert requests == list(range(len(requests)))
    assert set(rows["request_index"].to_pylist()) == set(requests)
