"""Processes that begin in milliseconds: `ludic` commands, and ranks of a script.

They are forked from a process that has imported what they need; a new process spends six seconds of CPU on imports.
Each is a process of its own for the kernel, with its own signals, files and exit code. How a new process begins, and
how torchrun starts ranks, is for tests that start them as a user does. They reach S3 through s3fs: obstore's threads
are not forked.
"""

import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

from benchmarks.ports import free_port

_PRELOADED = [
    "ludic.cli.main",
    "ludic.cli.commands",
    "ludic.engines.transformers_engine",
    "ludic.launch.here",
    "ludic.launch.work",
    "ludic.training.trainer",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}

_context = multiprocessing.get_context("forkserver")


class Forked:
    """A process with the methods of subprocess.Popen that tests use; what it prints is in `log`."""

    def __init__(self, words: Sequence[str | Path], log: Path, environment: Mapping[str, str] = os.environ) -> None:
        """words: `ludic` and its arguments, or a script and its own."""
        # A fork server passes over modules that are not there.
        assert all(map(find_spec, (name for name in _PRELOADED if name.startswith("ludic")))), _PRELOADED
        _context.set_forkserver_preload(_PRELOADED)
        with patch.dict(os.environ, _ONE_THREAD):  # read when torch is imported
            forkserver.ensure_running()
        self.log = log
        args = ([str(word) for word in words], str(log), {**environment, **_ONE_THREAD})
        self._process = _context.Process(target=_live, args=args)
        self._process.start()
        self.pid, self.sentinel = self._process.pid, self._process.sentinel

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.log), timeout)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def printed(self) -> str:
        return self.log.read_text()


def run_ranks(num_ranks: int, words: Sequence[str | Path], folder: Path, timeout_s: float = 500) -> None:
    """Run `words` on ranks that talk to each other, and wait for all; each must end with 0. folder: of their logs."""
    group = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(num_ranks):
        environment = {name: str(value) for name, value in ({"RANK": rank, "LOCAL_RANK": rank} | group).items()}
        ranks.append(Forked(words, folder / f"rank-{rank}.log", os.environ | environment))
    deadline = time.monotonic() + timeout_s
    try:
        while (running := [rank for rank in ranks if rank.poll() is None]) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < deadline, "\n".join(rank.printed()[-3000:] for rank in ranks)
            multiprocessing.connection.wait([rank.sentinel for rank in running], 1)
    finally:
        for rank in ranks:
            rank.kill()  # the others wait for one that failed
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(rank.printed()[-3000:] for rank in ranks)


def _live(words: list[str], log: str, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)  # that of the fork server is older than the test's
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.argv = words
    if words[0] == "ludic":
        from ludic.cli.main import main

        main(words[1:])
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
