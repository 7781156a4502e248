"""Real vLLM servers of tests: processes of this machine on free ports, on the CPU, with the tiny model."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forks import Forked

from benchmarks.ports import free_port
from ludic.engines import server_http

RECOMMENDED = tuple(server_http.FLAGS.partition(" MODEL ")[2].split())
"""Flags of the command that ludic's errors recommend."""
FLAGS = (*RECOMMENDED, "--max-logprobs", "-1")
_START_WITHIN_S = 400.0


class VllmServer:
    """One server, which can be killed and started again on the same port."""

    def __init__(self, folder: str, log: Path, flags: tuple[str, ...] = FLAGS) -> None:
        self.folder, self.log, self.flags, self.port = folder, log, flags, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Forked | subprocess.Popen | None = None

    def start(self) -> None:
        command = ["vllm", "--model", self.folder]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--no-enable-chunked-prefill", "--max-num-seqs", "256", *self.flags]
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.process = Forked(command, self.log, {**os.environ, **variables})

    def wait(self) -> None:
        """Wait until the server answers."""
        assert self.process is not None
        until = time.monotonic() + _START_WITHIN_S
        while not self.answers():
            ended = self.process.poll() is not None
            assert not ended, self.log.read_text()[-3000:]
            assert time.monotonic() < until, f"the server did not start: {self.log.read_text()[-3000:]}"
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it, with the processes that it started, as when its machine goes down."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def running_servers(
    folder: str, logs: Path, count: int = 1, flags: tuple[str, ...] = FLAGS
) -> Iterator[list[VllmServer]]:
    """Give servers that answer; they start at the same time."""
    servers = [VllmServer(folder, logs / f"vllm-{index}.log", flags) for index in range(count)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
