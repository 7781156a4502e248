"""Fork the processes of a run in milliseconds from a process that has already imported torch and transformers.

Each supervisor, such as `ludic run`, has its own server. The server has no name in the file system, and ends when the
supervisor's end of their socket closes. The supervisor sends arguments and environment of a process as JSON, with
descriptors of its standard input and its log. The server forks, and answers with the process's id and a descriptor of
it; once the process has ended, it sends the exit status. Forked processes survive the end of the server.

A forked process behaves like `python -P -m ARGS`: it has its own session, environment, streams, title and random
numbers. Variables that libraries read at import can't change any more, so a process whose environment differs from the
server's in more than FREE is not forked. multiprocessing's forkserver is not used, since its children unpickle and take
over their parent's module path.

The server imports nothing that starts threads or looks for GPUs, since a fork copies neither. Linux only.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

from ludic.app.launch.config import LaunchConfig, Start
from ludic.app.launch.process import ENVIRONMENT, SUPERVISED, stop_variables
from ludic.base import MEMORY_VARIABLE, VARIABLE, python_words, safe_environment, start_python
from ludic.engines import EngineConfig

FREE = frozenset({SUPERVISED, VARIABLE, MEMORY_VARIABLE, "WANDB_SERVICE", "TORCHINDUCTOR_CACHE_DIR"})
"""Environment variables in which forked processes may differ: nothing that the server imports reads them meanwhile.

wandb and torch set their own in the supervisor, after the server's start.
"""
MODULES = (
    "setproctitle",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.flop_counter",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
"""Modules that the server imports, which takes each trainer, worker and evaluator seven seconds."""

_LONGEST_START_S = 120.0
"""Seconds after which an unresponsive server is abandoned; the first answer waits for its imports."""
_MOST_BYTES = 1 << 20
_POLL_S = 0.01


@contextmanager
def start_server(start: Start) -> Iterator["StartServer | None"]:
    """Yield a server that forks the run's processes, and imports while the caller makes its checks.

    Yields None if none of the processes can be forked, or this system has no descriptors of processes. Raises
    ConfigError.
    """
    if not _has_forks(start.processes, start.engine, start.run.num_workers):
        yield None
        return
    environment = _variables_of(start.processes, start.run.num_workers)
    early = next((server for server in _early if server.fits(environment)), None)
    with StartServer(environment) if early is None else nullcontext(early) as server:
        yield server


_early: list["StartServer"] = []


@contextmanager
def started_early(processes: LaunchConfig, engine: EngineConfig, num_workers: int) -> Iterator[None]:
    """Start the server of the run that the block launches: it imports while the block creates that run.

    num_workers: of the run's schedule. A run with another environment starts a server of its own. Does nothing where
    `start_server` yields None. Raises ConfigError.
    """
    if not _has_forks(processes, engine, num_workers):
        yield
        return
    with StartServer(_variables_of(processes, num_workers)) as server:
        _early.append(server)
        try:
            yield
        finally:
            _early.remove(server)


def _has_forks(processes: LaunchConfig, engine: EngineConfig, num_workers: int) -> bool:
    """Return whether a run of num_workers has processes that may be forked here."""
    has_engines = processes.engines_of(num_workers) > 0
    forks = forks_trainer(processes) or (has_engines and forks_engine(engine))
    return processes.launcher == "local" and forks and is_supported()


def _variables_of(processes: LaunchConfig, num_workers: int) -> dict[str, str]:
    """Return all environment variables of a run's processes, while it trains."""
    return {**os.environ, **environment_of(processes.ranks + processes.engines_of(num_workers), processes)}


def forks_trainer(processes: LaunchConfig) -> bool:
    """Return whether the trainer may be forked: torchrun starts its ranks from nothing."""
    return processes.ranks == 1


def forks_engine(engine: EngineConfig) -> bool:
    """Return whether workers and the evaluator may be forked: vLLM starts processes of its own."""
    return not engine.is_vllm


def environment_of(num_processes: int, processes: LaunchConfig) -> dict[str, str]:
    """Return environment variables of all processes of a run. num_processes: that use the cores at the same time."""
    environment = {**ENVIRONMENT, **stop_variables(processes.stop_within_s)}
    if "OMP_NUM_THREADS" in os.environ:
        return environment
    # By default torch uses all cores in each process.
    return {**environment, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes))}


class StartServer:
    """The supervisor's side; to be used by one thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it, and do not wait for its imports. environment: all variables of the processes to start, but FREE."""
        self._place, self._environment = Path.cwd(), _compared(safe_environment(environment))
        self._forked: dict[int, ForkedProcess] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_python(
                ["-m", __name__, str(theirs.fileno())],
                environment=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket.settimeout(_LONGEST_START_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._socket.fileno() == -1

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with these variables, which are all of them, may be forked."""
        is_alike = _compared(safe_environment(environment)) == self._environment
        return is_alike and not self.has_ended and Path.cwd() == self._place

    def start(self, args: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> "ForkedProcess | None":
        """Start `python -m ARGS` with a pipe as standard input; returns None if it can't be forked here.

        environment: all variables. log: gets its stdout and stderr.
        """
        variables = safe_environment(environment)
        if not self.fits(variables):
            return None
        message = json.dumps({"args": list(args), "environment": variables}).encode()
        reading, writing = os.pipe()
        stdin = os.fdopen(writing, "wb", buffering=0)
        try:
            socket.send_fds(self._socket, [message], [reading, log.fileno()])
            while (started := self._hear()) is None:
                pass
        except BaseException as error:
            stdin.close()  # this ends a process that was forked nevertheless
            if not isinstance(error, OSError):
                raise
            self.close()
            return None
        finally:
            os.close(reading)
        process = ForkedProcess(self, *started, stdin)
        self._forked[process.pid] = process
        return process

    def listen(self) -> None:
        """Receive the server's messages about ended processes."""
        with suppress(OSError):
            while not self.has_ended and _is_ready(self._socket.fileno()):
                if (unclaimed := self._hear()) is not None:  # `start` was interrupted before the answer
                    os.close(unclaimed[1])

    def close(self) -> None:
        """End the server; forked processes continue, but their exit status stays unknown."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "StartServer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _hear(self) -> tuple[int, int] | None:
        """Receive one message; return id and descriptor of a started process. Raises OSError if there is none."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 1)
        if not data:
            self.close()
            raise ConnectionResetError("the server has ended")
        said = json.loads(data)
        if descriptors:
            return said["pid"], descriptors[0]
        if (process := self._forked.pop(said["pid"], None)) is not None:
            process.returncode = said["returncode"]
        return None


class ForkedProcess:
    """A process with those methods of subprocess.Popen that a supervisor uses."""

    def __init__(self, server: StartServer, pid: int, descriptor: int, stdin: IO[bytes]) -> None:
        """descriptor: of the process (pidfd)."""
        self._server, self.pid, self._descriptor, self.stdin = server, pid, descriptor, stdin
        self.returncode: int | None = None
        """Exit status as in Popen; -SIGKILL if the server ended first, since only the server receives the status."""

    def __del__(self) -> None:
        os.close(self._descriptor)

    def poll(self) -> int | None:
        if self.returncode is None:
            self._server.listen()
        if self.returncode is None and self._server.has_ended and _is_ready(self._descriptor):
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (returncode := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        return returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)


def _is_ready(descriptor: int) -> bool:
    """Return whether a descriptor is readable or its process has ended; `select` refuses descriptors from 1,024 on."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def is_supported() -> bool:
    """Return whether this system can have a server: Linux 5.3, with descriptors of processes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _compared(environment: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environment.items() if name not in FREE}


# --- The server ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve; in each forked process, run the module of its request."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to every page, so that each process would get its own copy
    _become(serve(connection))


def serve(connection: socket.socket) -> Mapping[str, Any]:
    """Fork a process for each request. Returns only in such a process, with its request."""
    running: dict[int, int] = {}
    """Id of each process, by its descriptor."""
    while True:
        ready, _, _ = select.select([connection.fileno(), *running], [], [])
        for descriptor in ready:
            if descriptor == connection.fileno():
                data, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
                if not data:
                    _leave()
                pid = _fork(descriptors)
                if pid == 0:
                    connection.close()
                    for other in running:
                        os.close(other)
                    return json.loads(data)
                process = os.pidfd_open(pid)
                running[process] = pid
                _send(connection, {"pid": pid}, [process])
            else:
                pid = running.pop(descriptor)
                returncode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(descriptor)
                _send(connection, {"pid": pid, "returncode": returncode}, [])


def _fork(descriptors: Sequence[int]) -> int:
    """Fork a process with a session of its own, and return its id; 0 in the process, whose streams are set.

    descriptors: of its standard input, and of its stdout and stderr; they are closed.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        stdin, log = descriptors
        for descriptor, stream in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, stream)
        os.close(reading)
    for descriptor in (*descriptors, writing):
        os.close(descriptor)
    if pid:
        os.read(reading, 1)  # wait for the session, whose processes a supervisor kills together
        os.close(reading)
    return pid


def _send(connection: socket.socket, said: Mapping[str, int], descriptors: Sequence[int]) -> None:
    try:
        socket.send_fds(connection, [json.dumps(said).encode()], descriptors)
    except OSError:  # the supervisor has ended
        _leave()


def _leave() -> NoReturn:
    os._exit(0)


def _become(request: Mapping[str, Any]) -> None:
    """Set up the process like `python -P -m ARGS` of a request."""
    import numpy as np
    import torch
    from setproctitle import setproctitle

    sys.orig_argv[:] = python_words(["-m", *request["args"]])
    setproctitle(" ".join(sys.orig_argv))  # first, since it searches for the memory of the original environment
    os.environ.clear()
    os.environ.update(request["environment"])
    module, *sys.argv[1:] = request["args"]
    np.random.seed()  # NumPy's generator, which users' code may use; `random` reseeds itself
    torch.default_generator.seed()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
