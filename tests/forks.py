"""Processes that begin in milliseconds: `ludic` commands, ranks of a script, kernels of notebooks, and servers of vLLM.

They are forked from a process that has imported what they need; a new process spends six seconds of CPU on imports.
Each is a process of its own for the kernel, with its own signals, files and exit code. A run that begins so forks its
start server from itself, and a torchrun that `ludic train --ranks` becomes its ranks. How a new process begins is for
tests that start it as a user does. They reach S3 through s3fs: obstore's threads are not forked.
"""

import atexit
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NoReturn
from unittest.mock import patch

import psutil
from setproctitle import setproctitle

from benchmarks.ports import free_port
from ludic.base.installed import is_installed

_PRELOADED = [
    "ludic.app.cli.main",
    "ludic.app.cli.commands",
    "ludic.engines.transformers_engine",
    "ludic.app.launch.evaluate",
    "ludic.app.launch.train",
    "ludic.app.launch.sample",
    "ludic.training.trainer",
    "torch.distributed.run",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]
_TORCHRUN_STARTS = "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler"
_VLLM = "vllm.entrypoints.openai.api_server"
_AT_IMPORT = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Environment of all that is forked: libraries read it when they are imported. One thread compiles in its process, more
start processes that import torch."""
if is_installed("vllm"):
    _PRELOADED += [_VLLM, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]
    _AT_IMPORT |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

WarningFilter = Literal["default", "error"]

_context = multiprocessing.get_context("forkserver")


class Forked:
    """A process with the methods of subprocess.Popen that tests use; what it prints is in `log`."""

    def __init__(
        self,
        words: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] = os.environ,
        *,
        out: Path | None = None,
        cwd: Path | None = None,
        warnings: WarningFilter = "default",
    ) -> None:
        """words: `ludic`, `vllm` or `kernel` and its arguments, or a script and its own. out: gets its stdout instead.

        warnings: see -W. A process of vllm and a kernel have a session of their own.
        """
        _ensure_running()
        self.log, self._out = log, out or log
        streams = str(self._out), str(log)
        variables = {**environment, **_AT_IMPORT}
        args = ([str(word) for word in words], streams, variables, str(cwd or Path.cwd()), warnings)
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

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._out.read_text(), self.log.read_text()


def _ensure_running() -> None:
    # A fork server passes over modules that are not there.
    assert all(map(find_spec, (name for name in _PRELOADED if name.startswith("ludic")))), _PRELOADED
    if forkserver._forkserver._preload_modules != _PRELOADED:  # type: ignore[attr-defined]
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # one of a benchmark, with its imports
    _context.set_forkserver_preload(_PRELOADED)
    with patch.dict(os.environ, _AT_IMPORT):
        forkserver.ensure_running()


def ludic(
    *words: str | Path, folder: Path, environment: Mapping[str, str] = os.environ, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command of ludic in a folder, as subprocess.run does."""
    with TemporaryDirectory() as streams:
        out, log = Path(streams, "out"), Path(streams, "err")
        process = Forked(["ludic", *words], log, environment, out=out, cwd=folder)
        try:
            stdout, stderr = process.communicate(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, process.wait(), stdout, stderr)


def words_of(process: psutil.Process) -> list[str]:
    """The command of a process, which a forked one holds as one text with zeros behind it; words have no blanks."""
    return " ".join(process.cmdline()).rstrip().split(" ")


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


def _live(
    words: list[str], files: Sequence[str], environment: Mapping[str, str], cwd: str, warned: WarningFilter
) -> None:
    setproctitle(" ".join(words))  # first: processes forked from this one can't find the memory for theirs later
    os.environ.clear()
    os.environ.update(environment)  # that of the fork server is older than the test's
    installed = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in installed if path and path not in sys.path]
    os.chdir(cwd)
    for stream, file in enumerate(files, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    warnings.simplefilter(warned)
    sys.argv = words
    with (
        patch("ludic.app.launch.fork_server.start_python", _ForkedServer),
        patch("ludic.app.launch.train.become_python", _become_module),
        patch(f"{_TORCHRUN_STARTS}._popen", lambda handler, args, environment: _ForkedRank(args, environment)),
    ):
        if words[0] == "ludic":
            from ludic.app.cli.main import main

            main(words[1:])
        elif words[0] == "vllm":
            _serve_with_vllm()
        elif words[0] == "kernel":
            os.setsid()
            from ipykernel.kernelapp import launch_new_instance

            launch_new_instance(words[1:])
        else:
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")


@contextmanager
def forked_kernels(logs: Path) -> Iterator[None]:
    """Within the block, Jupyter's kernels are forked. logs: folder of what they print themselves."""
    with patch("jupyter_client.provisioning.local_provisioner.launch_kernel", partial(_ForkedKernel, logs)):
        yield


class _ForkedKernel(Forked):
    """A kernel, with those attributes of Popen that Jupyter uses."""

    stdin = stdout = stderr = None

    def __init__(self, logs: Path, cmd: Sequence[str], *, env: Mapping[str, str], cwd: str, **options: object) -> None:
        super().__init__(["kernel", *cmd[cmd.index("-f") :]], logs / "kernel.log", env, cwd=Path(cwd))
        # Jupyter signals the group of the process, which at first is that of this one.
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)


def _serve_with_vllm() -> None:
    os.setsid()
    with _instead_of_spawning(multiprocessing.get_context("fork")):
        runpy.run_module(_VLLM, run_name="__main__", alter_sys=True)


def forked_vllm() -> AbstractContextManager[None]:
    """Within the block, engines of vLLM are forked from the same process as all others here.

    That is its own way where it has GPUs; on a CPU it starts three processes that import everything.
    """
    _ensure_running()
    return _instead_of_spawning(_Engines())


@contextmanager
def _instead_of_spawning(context: multiprocessing.context.BaseContext) -> Iterator[None]:
    get_context = multiprocessing.get_context
    with patch.object(multiprocessing, "get_context", lambda name: context if name == "spawn" else get_context(name)):
        yield


class _Engine(_context.Process):  # type: ignore[name-defined]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._variables = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._variables)
        with _instead_of_spawning(multiprocessing.get_context("fork")):  # its workers
            super().run()


class _Engines(multiprocessing.context.ForkServerContext):
    Process = _Engine


def _end_with(main: Callable[[], None]) -> NoReturn:
    """Call a function and end this forked process as Python ends one of its own."""
    code: object = 0
    try:
        main()
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


class _ForkedServer:
    """A start server, forked from the process that asks for it; with those methods of Popen that this one uses."""

    def __init__(self, args: Sequence[str], *, pass_fds: Sequence[int], **options: object) -> None:
        """args: `-m`, the module, and the descriptor of its end of the socket, which is passed on."""
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            for path in list(Path("/proc/self/fd").iterdir()):
                if int(path.name) > 2 and int(path.name) not in pass_fds:
                    with suppress(OSError):
                        os.close(int(path.name))
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            sys.argv = ["start_server", *args[2:]]
            _end_with(import_module(args[1]).main)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def _become_module(args: Sequence[str], *, environment: Mapping[str, str]) -> NoReturn:
    """Go on as `python ARGS` would, with what is imported here. args: `-m`, and a module with its own."""
    os.environ.update(environment)
    sys.argv = list(args[1:])
    setproctitle(" ".join((sys.executable, "-P", *args)))
    runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    sys.exit()


class _ForkedRank:
    """A rank, forked from its torchrun; with those methods of Popen that this one uses."""

    def __init__(self, args: Sequence[str], environment: Mapping[str, str]) -> None:
        """args: Python and its flags, `-m ludic`, and its own."""
        self.args = args
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            atexit._clear()  # what torchrun does at its own end
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = list(args[args.index("-m") + 1 :])
            setproctitle(" ".join(args))
            _end_with(partial(import_module("ludic.app.cli.main").main, sys.argv[1:]))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.02)
        return code
