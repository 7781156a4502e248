"""Processes that are forked from a start server are those that `python -P -m` would start."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
from hostile_folders import hostile_folder, imported_from

from ludic.app.launch.config import LaunchConfig, Start
from ludic.app.launch.fork_server import (
    FREE,
    MODULES,
    ForkedProcess,
    StartServer,
    is_supported,
    start_server,
    started_early,
)
from ludic.app.launch.process import SUPERVISED, stop_variables
from ludic.app.launch.supervisor import ChildProcess, ProcessDiedError, supervise
from ludic.base.processes import start_python
from ludic.engines.config import EngineConfig
from ludic.run.config import RunConfig
from ludic.training.config import TrainConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_supported(), reason="this system has no descriptors of processes"),
]

# What a process can see of itself; what differs between any two processes is left out.
LOOK = """
import gc, json, logging, os, random, signal, sys, threading
import numpy as np, torch
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "main": [main.__name__, main.__spec__.name, main.__file__],
    "environment": dict(os.environ), "folder": os.getcwd(), "umask": os.umask(0o22),
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:3], "tasks": len(os.listdir("/proc/self/task")),
    "open": len(os.listdir("/proc/self/fd")),
    "streams": [(each.fileno(), each.encoding, each.errors, each.line_buffering, each.isatty())
                for each in (sys.stdin, sys.stdout, sys.stderr)],
    "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "blocked": [str(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "words": open("/proc/self/cmdline").read().replace("\\0", " ").strip(), "python": sys.executable,
    "hash": hash("text"), "torch": torch.get_num_threads(),
    "handlers": str(logging.getLogger().handlers), "threads": threading.active_count(), "collects": gc.isenabled(),
    "read": sys.stdin.read(),
}))
"""
DRAW = """
import random, uuid, numpy as np, torch, uuid_utils
print(random.random(), np.random.rand(), np.random.default_rng().random(), torch.rand(1).item(), uuid.uuid4(),
      uuid_utils.uuid7())
"""
ENDS = """
import sys
exec(sys.argv[1])
"""
# Ends when its standard input does, as each process of `ludic run`.
WAIT = """
import sys
from pathlib import Path
with Path(sys.argv[1]).open("a") as lives:
    lives.write("life\\n")
sys.stdin.read()
"""


SUPERVISOR = """
import os, sys, time
from pathlib import Path
from ludic.app.launch.fork_server import StartServer
folder = Path(sys.argv[1])
server = StartServer(os.environ)
process = server.start(["waits", str(folder / "lives")], os.environ, (folder / "log").open("wb"))
(folder / "partial").write_text(f"{server.pid} {process.pid}")
(folder / "partial").rename(folder / "pids")
time.sleep(1000)
"""
IMPORTS = """
import os, sys
from importlib import import_module
import torch
def refuse(*_): raise AssertionError("the server looks for GPUs")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = torch._C._cuda_init = refuse
for name in sys.argv[1:]:
    import_module(name)
import ludic.app.launch.fork_server, numpy, setproctitle
print(len(os.listdir("/proc/self/task")), *sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modules that processes run."""
    folder = tmp_path_factory.mktemp("modules")
    for name, text in {
        "look": LOOK,
        "draw": DRAW,
        "waits": WAIT,
        "ends": ENDS,
        "supervises": SUPERVISOR,
        "imports": IMPORTS,
    }.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module", autouse=True)
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of all tests."""
    folder = hostile_folder(tmp_path_factory.mktemp("user") / "hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def environment(modules: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(modules), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@pytest.fixture(scope="module")
def server(hostile: Path, environment: dict[str, str]) -> Iterator[StartServer]:
    """One for all tests but those that kill it: its imports take seven seconds."""
    with StartServer(environment) as server:
        yield server


Run = Callable[..., str]


@pytest.fixture
def forked(server: StartServer, environment: dict[str, str], tmp_path: Path) -> Run:
    """Run a module in a forked process, and return what it prints."""

    def run(*args: str, more: Mapping[str, str] = MappingProxyType({})) -> str:
        log = tmp_path / "forked.log"
        with log.open("wb") as file:
            process = server.start(args, environment | more, file)
        assert process is not None
        process.stdin.close()
        assert process.wait(60) == 0, log.read_text()
        return log.read_text()

    return run


def started(args: list[str], environment: Mapping[str, str], log: Path, **options) -> str:
    """What a process prints that is started from nothing, as a supervisor does."""
    with log.open("wb") as file:
        process = start_python(
            ["-m", *args],
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
        process.stdin.close()
    assert process.wait(60) == 0, log.read_text()
    return log.read_text()


def test_a_forked_process_sees_what_one_from_nothing_sees(forked: Run, environment, tmp_path: Path) -> None:
    args, more = ["look", "--config", "a file with blanks"], dict.fromkeys(FREE, "7")
    found = json.loads(forked(*args, more=more))
    wanted = json.loads(started(args, environment | more, tmp_path / "started.log"))
    assert found.pop("environment") == wanted.pop("environment")
    assert found == wanted


def test_forked_processes_draw_other_random_numbers(forked: Run) -> None:
    drawn = [forked("draw").split() for _ in range(2)]
    assert not set(drawn[0]) & set(drawn[1])


def test_a_module_beside_the_user_is_not_imported(forked: Run, hostile: Path) -> None:
    forked("draw")
    assert imported_from(hostile) == []


@pytest.mark.parametrize(("num_workers", "num_servers"), [(2, 1), (1, 2)])
def test_a_run_takes_the_server_that_was_started_early_if_it_fits(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, num_servers: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # which then depends on the number of processes
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    run = RunConfig(model="tiny", env=("moar_cats",), num_workers=2)
    train, processes = TrainConfig.of(num_steps=1, learning_rate=1e-3), LaunchConfig()
    start = Start(url="run", run=run, train=train, processes=processes, engine=EngineConfig(), root=None)

    def arguments(child: psutil.Process) -> list[str]:
        while not (found := child.cmdline()):  # for a moment, a process that has just begun has none
            time.sleep(0.01)
        return found

    def servers() -> set[int]:
        children = psutil.Process().children()
        return {child.pid for child in children if "ludic.app.launch.fork_server" in arguments(child)}

    before = servers()
    with started_early(processes, EngineConfig(), num_workers), start_server(start) as server:
        assert server is not None
        assert server.pid in servers() - before
        assert len(servers() - before) == num_servers
    assert servers() == before


def test_what_is_read_by_imports_decides_what_may_be_forked(server, environment, tmp_path: Path, monkeypatch) -> None:
    with (tmp_path / "log").open("wb") as log:
        for name, value in {"TORCH_LOGS": "", "HF_HOME": "elsewhere", "OMP_NUM_THREADS": "2"}.items():
            assert server.start(["draw"], environment | {name: value}, log) is None
        assert server.start(["draw"], {**environment, "X": "y" * 10**7}, log) is None
        monkeypatch.chdir(tmp_path)
        assert server.start(["draw"], environment, log) is None


def test_a_child_with_another_environment_starts_from_nothing(server, environment, tmp_path: Path) -> None:
    child = ChildProcess(
        name="trainer",
        args=lambda: ["ends", "import os; print(os.environ['MY_NAME'])"],
        log=tmp_path / "log",
        may_fork=True,
        environment={"MY_NAME": "1"},
    )
    child.start(environment, server)
    assert isinstance(child.process, subprocess.Popen)
    child.process.stdin.close()
    assert child.process.wait(60) == 0
    assert child.log.read_text() == "1\n"


@pytest.mark.parametrize(
    ("code", "returncode", "printed"),
    [
        ("raise SystemExit(78)", 78, ""),
        ("raise ValueError", 1, "Traceback (most recent call last)"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'last')", 0, "last\n"),
    ],
)
def test_it_ends_as_any_process_does(server, environment, tmp_path: Path, code: str, returncode: int, printed: str):
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = server.start(["ends", code], environment, file)
    process.stdin.close()
    assert process.wait(60) == returncode
    assert process.poll() == returncode
    process.send_signal(signal.SIGTERM)  # to nobody
    assert log.read_text().startswith(printed)


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_waiting(server: StartServer, environment: Mapping[str, str], tmp_path: Path) -> ForkedProcess:
    with (tmp_path / "log").open("wb") as log:
        process = server.start(["waits", str(tmp_path / "lives")], environment, log)
    assert process is not None
    wait_for((tmp_path / "lives").exists)
    return process


def test_the_end_of_the_server_ends_no_process_and_a_supervised_run_goes_on_without_it(
    environment, tmp_path: Path
) -> None:
    with StartServer(environment) as server:
        process = start_waiting(server, environment, tmp_path)
        check_that_a_run_goes_on_when_its_server_is_killed(server, environment, tmp_path / "run")
        assert process.poll() is None
        assert psutil.pid_exists(process.pid)
        with (tmp_path / "log").open("wb") as log:
            assert server.start(["draw"], environment, log) is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGKILL  # how it ended is not known
        process.stdin.close()


def check_that_a_run_goes_on_when_its_server_is_killed(server: StartServer, environment, folder: Path) -> None:
    folder.mkdir()
    lives = folder / "lives"
    child = ChildProcess(name="trainer", args=lambda: ["waits", str(lives)], log=folder / "log", may_fork=True)
    kinds: list[type] = []

    def tick() -> None:
        if not kinds or kinds[-1] is not type(child.process):
            kinds.append(type(child.process))
        if not lives.exists():
            return
        if not server.has_ended:
            os.kill(server.pid, signal.SIGKILL)
            wait_for(lambda: (server.listen(), server.has_ended)[1])
        else:
            child.process.stdin.close()  # ends the first life, how is not known, and then the second one, with 0

    supervise(child, [], environment=environment, tick=tick, server=server)
    assert kinds == [ForkedProcess, subprocess.Popen]
    assert child.num_restarts == 1


def test_a_killed_supervisor_ends_server_and_processes(environment, tmp_path: Path) -> None:
    supervisor = start_python(["-m", "supervises", str(tmp_path)], environment=environment)
    wait_for((tmp_path / "pids").exists, 60)
    wait_for((tmp_path / "lives").exists)
    supervisor.kill()
    supervisor.wait()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_200_starts_leave_no_descriptor_no_process_and_no_memory(server, environment, tmp_path: Path) -> None:
    of_server, own = psutil.Process(server.pid), psutil.Process()

    def start(number: int) -> None:
        for _ in range(number):
            with (tmp_path / "log").open("wb") as log:
                process = server.start(["ends", "import os; os._exit(7)"], environment, log)
            process.stdin.close()
            assert process.wait(60) == 7

    def held() -> tuple[int, int, int]:
        return of_server.num_fds(), own.num_fds(), len(of_server.children())

    start(20)
    before, memory = held(), of_server.memory_info().rss
    start(200)
    assert held() == before
    assert of_server.memory_info().rss - memory < 2_000_000


STARTS_THREADS = {"pyarrow", "polars", "duckdb", "obstore", "grpc", "ray", "vllm", "pandas", "sklearn"}


def test_the_server_imports_nothing_that_starts_threads_or_looks_for_gpus(environment, tmp_path: Path) -> None:
    tasks, *modules = started(["imports", *MODULES], environment, tmp_path / "log").split()
    assert tasks == "1"
    assert not STARTS_THREADS & set(modules)
    assert SUPERVISED in FREE
    assert sys.platform == "linux"


# --- Supervised ------------------------------------------------------------------------------------------------------


def supervise_forked(
    server: StartServer, environment: Mapping[str, str], log: Path, code: str, **options
) -> ChildProcess:
    child = ChildProcess(name="trainer", args=lambda: ["ends", code], log=log, may_fork=True)
    supervise(child, [], environment=environment, server=server, **{"tick": lambda: None, **options})
    assert isinstance(child.process, ForkedProcess)
    return child


def test_deaths_of_forked_processes_count_and_tell_their_last_words(server, environment, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ProcessDiedError) as ended:
        supervise_forked(server, environment, log, "print('12:00:00 ludic: no head'); sys.exit(1)")
    assert str(ended.value) == (f"trainer died 3 times soon after its start: 12:00:00 ludic: no head ({log} has more)")
    with pytest.raises(ProcessDiedError, match="trainer ended with 78 and is not started again"):
        supervise_forked(server, environment, log, "print('ludic: no key'); sys.exit(78)")


# A process that leaves one of its group behind, and takes its time to stop, or does not stop.
STOPS = """
import os, signal, time
from pathlib import Path
folder = Path({folder!r})
child = os.fork()
if child == 0:
    time.sleep(1000)
def stop(*_):
    if {ends}:
        (folder / "stopped").touch()
        os._exit(0)
signal.signal(signal.SIGTERM, stop)
(folder / "partial").write_text(f"{{os.getpid()}} {{child}}")
(folder / "partial").rename(folder / "pids")
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("ends", [True, False])
def test_a_forked_process_is_stopped_with_all_of_its_group(server, environment, tmp_path: Path, monkeypatch, ends):
    stops = stop_variables(60 if ends else 1)
    monkeypatch.setattr("ludic.app.launch.supervisor.KILL_AFTER_S", 0.0)
    monkeypatch.setattr("ludic.app.launch.fork_server.FREE", FREE | stops.keys())  # no other server for each time

    def tick() -> None:
        if (tmp_path / "pids").exists():
            raise KeyboardInterrupt

    code = STOPS.format(folder=str(tmp_path), ends=ends)
    with pytest.raises(KeyboardInterrupt):
        supervise_forked(server, environment | stops, tmp_path / "log", code, tick=tick)
    assert (tmp_path / "stopped").exists() == ends
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any(map(is_running, pids)))
