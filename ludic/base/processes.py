"""Start Python processes that do not import from the working directory; only this module starts processes.

The working directory may be another user's root, or any folder with a file torch.py. `python -m` searches it first for
modules. So each process gets the flag -P, and PYTHONSAFEPATH in its environment for the processes that it starts in
turn, such as the ranks of torchrun and the children of multiprocessing.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from asyncio.subprocess import Process

SAFE_ENVIRONMENT = MappingProxyType({"PYTHONSAFEPATH": "1"})
"""Environment variables of every process that ludic starts."""
_FORCE_COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables that let a program colour what it writes to a file; Python 3.13 does so with its tracebacks. A notebook's
kernel sets them, and the processes that ludic starts write log files; on a terminal programs do not need them."""
_SAFE_FLAG = "-P"
_PR_SET_PDEATHSIG = 1


def python_words(args: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the words of `python ARGS`; python: the program, such as "python" on another machine."""
    return [python, _SAFE_FLAG, *args]


def start_python(
    args: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start `python ARGS`. environment: all its variables; None takes those of this process. options: of Popen."""
    return subprocess.Popen(python_words(args), env=safe_environment(environment), **options)


async def start_python_in_loop(
    args: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> "Process":
    """Start `python ARGS` as `start_python` does, in the running event loop."""
    import asyncio  # `ludic --help` answers at once

    return await asyncio.create_subprocess_exec(*python_words(args), env=safe_environment(environment), **options)


async def start_guarded(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    limits: Mapping[str, int],
    source: Path = Path(os.devnull),
) -> "Process":
    """Start a command in the running event loop, below a process that ends all processes of the command with it.

    They also end when the standard input of the process is closed, and when this process dies. environment: all its
    variables. limits: as of ludic.base.guard. source: file that is the command's standard input. Output and errors come
    from `stdout`; the exit code is 128 + N for signal N, and 127 if the command can't be started.
    """
    from asyncio.subprocess import PIPE, STDOUT

    guard = str(Path(__file__).with_name("guard.py"))
    args = ["-I", "-S", guard, json.dumps(dict(limits)), str(source), *words]
    options: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": STDOUT, "start_new_session": True}
    return await start_python_in_loop(args, environment=environment, cwd=folder, **options)


def become_python(args: Sequence[str], *, environment: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by `python ARGS`."""
    os.execve(sys.executable, python_words(args), safe_environment(environment))


def protect_library_processes() -> None:
    """Protect the processes that libraries start here, such as vLLM's, through this process's environment."""
    os.environ.update(SAFE_ENVIRONMENT)


def describe_end(returncode: int) -> str | None:
    """Describe how a process ended; None for exit code 0."""
    if not returncode:
        return None
    if returncode < 0:
        return f"ended by signal {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def host_bytes() -> int | None:
    """Return the memory of the machine, or less if a container is limited to less; None if it is unknown."""
    known = []
    with suppress(ValueError, OSError, AttributeError):  # not on every system
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(ValueError, OSError):  # "max" without a limit
        known.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(known, default=None)


def peak_memory() -> int:
    """Return the most memory that was resident since this program began, in bytes."""
    with suppress(OSError), Path("/proc/self/status").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # which Windows lacks

    # In kB, but bytes on macOS. On Linux a process that was forked counts its parent's, so that it comes second.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def signal_when_parent_ends(number: int) -> None:
    """Let the kernel signal this process when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. Linux only."""
    parent = os.getppid()
    signal_when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def safe_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    """Return all variables of a process to start, without those that force colours; None takes those of this
    process."""
    given = os.environ if environment is None else environment
    return {**{name: value for name, value in given.items() if name not in _FORCE_COLOURS}, **SAFE_ENVIRONMENT}
