"""Workers that are really killed, at moments that nobody chose."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ludic.store import RolloutReader, Root, list_files

SCRIPT = Path(__file__).parent / "append_until_killed.py"


def start_worker(root: Root, number: int) -> subprocess.Popen[str]:
    """Its groups are those of seeds that no other worker has."""
    args = [sys.executable, str(SCRIPT), root.url, f"w{number}", str(number * 100_000)]
    path = [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=environment)


def kill_at_random(worker: subprocess.Popen[str]) -> list[str]:
    """SIGKILL at some moment after its first flush; the group_ids whose flush had returned."""
    first = worker.stdout.readline()
    time.sleep(random.uniform(0, 0.1))
    worker.kill()
    rest, _ = worker.communicate()
    # A last line without an end was cut by the kill.
    return [
        group_id
        for line in (first + rest).splitlines(keepends=True)
        if line.endswith("\n")
        for group_id in line.split()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("root_url", "num_kills"), [("local", 8), ("s3", 6)], indirect=["root_url"])
def test_killed_workers_leave_whole_files_and_all_that_was_flushed(root, num_kills):
    flushed: list[str] = []
    for number in range(0, num_kills, 2):
        workers = [start_worker(root, number), start_worker(root, number + 1)]
        for worker in workers:
            flushed += kill_at_random(worker)

    reader = RolloutReader(root, ["rollout_id"])
    rows = reader.poll(None)
    assert reader.broken_files == {}
    delivered = Counter(rows.column("group_id").to_pylist())
    assert set(flushed) <= set(delivered)
    assert set(delivered.values()) == {3}, "a group in pieces, or twice"
    assert {file.worker_id for file in list_files(root)} == {f"w{number}" for number in range(num_kills)}
    for file in list_files(root):
        with root.open_file(file.name) as source:
            assert pq.read_table(source).num_rows % 3 == 0
