"""Time the list of 300 runs of a folder: as the command `ludic runs`, with its imports, and in a process that has them.

    python -m benchmarks.runs

Each run has settings of its own, a trainer that has ended, and 8 files of metrics each of the trainer and of a worker;
of a longer run as many files are read. The same runs are then listed on an S3 server on this machine (moto, one process
of Python), without latency and with 20 ms added to each response.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from benchmarks.measure import print_table, take_turns, with_spread
from benchmarks.s3_server import BUCKET, s3_server
from ludic.app.show.run_table import tabulate
from ludic.root import start_attempt
from ludic.root.rows import MetricsLog
from ludic.root.storage import Storage
from ludic.run import RunConfig, put_run
from ludic.settings import run_script
from ludic.training import TrainConfig

_NUM_STEPS = 8
_LATENCIES_S = {"s3": 0.0, "s3, 20 ms": 0.02}


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: List a few runs once, to check that the benchmark works.
    """
    num_runs, rounds = (4, 1) if quick else (300, 3)
    with tempfile.TemporaryDirectory() as folder, s3_server(_LATENCIES_S) as server:
        for number in range(num_runs):
            _make_run(f"{folder}/lr{number % 30}/seed{number // 30}", number)
        _upload(Path(folder), f"s3://{BUCKET}/runs")
        calls = {
            "a disk: the command": lambda: _command(folder, num_runs),
            "a disk: imports aside": lambda: _list(folder, num_runs),
        }
        seconds, cpu_s, requests = take_turns(calls, rounds), {name: _cpu_s(call) for name, call in calls.items()}, {}
        for client in _LATENCIES_S:
            server.serve(client)
            name, call = f"{client}: imports aside", partial(_list, f"s3://{BUCKET}/runs", num_runs)
            seconds |= take_turns({name: call}, rounds)
            before = server.counts()
            cpu_s[name], requests[name] = _cpu_s(call), (server.counts() - before).total()
    rows = [
        [
            name,
            f"{with_spread([1000 * each for each in times])}",
            f"{1000 * cpu_s[name]:,.0f}",
            f"{requests.get(name, 0):,}",
        ]
        for name, times in seconds.items()
    ]
    print_table(f"runs: {num_runs} runs of {_NUM_STEPS} steps", ["", "ms", "of the CPU", "requests"], rows)


def _cpu_s(call: Callable[[], None]) -> float:
    """Return the seconds of the CPU, of all threads and of processes that it waits for, that a call takes."""
    before = os.times()
    call()
    return sum(os.times()[:4]) - sum(before[:4])


def _make_run(url: str, number: int) -> None:
    root = put_run(url, RunConfig(model="tiny", env=("moar_cats",), seed=number // 30))
    config = TrainConfig.of(num_steps=_NUM_STEPS, learning_rate=1e-6 * (1 + number % 30)).flat()
    attempt = start_attempt(root, config=config)
    for kind in ("train", "worker"):
        with closing(MetricsLog(root, kind, f"{kind}-1")) as log:
            for step in range(1, _NUM_STEPS + 1):
                own = {"attempt_id": attempt.attempt_id, "step": step} if kind == "train" else {"env_name": "moar_cats"}
                log.write(policy_version=step, reward_mean=step / 100, num_tokens=1_000, num_rollouts=64, **own)
                log.flush()


def _upload(folder: Path, url: str) -> None:
    storage = Storage.connect(url)
    files = [file for file in folder.rglob("*") if file.is_file()]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda file: storage.put(file.relative_to(folder).as_posix(), file.read_bytes()), files))


def _list(folder: str, num_runs: int) -> None:
    assert [each.state for each in tabulate(folder).runs] == ["finished"] * num_runs


def _command(folder: str, num_runs: int) -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    listed = subprocess.check_output([sys.executable, "-m", "ludic", "runs", folder], env=environment, text=True)
    assert listed.count("finished") == num_runs


if __name__ == "__main__":
    run_script(main)
