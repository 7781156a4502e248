"""Run a command for another process, within limits, and leave none of its processes behind.

A program of its own, with nothing but the standard library: `python -I -S guard.py LIMITS INPUT WORD...`. It ends all
processes of the command when the command ends, when its standard input is closed, as the kernel does if the process
that started it dies, and on SIGTERM. On Linux it also ends those that have left the command's process group. Its exit
code is the command's, or 128 + N for signal N, as a shell has it; 127 if the command can't be started.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NOT_STARTED = 127


def main(limits: "dict[str, int]", source: str, words: "list[str]") -> int:
    """Run the command and return the exit code.

    limits: by the end of the name of a resource, such as {"CPU": 60}. source: file that is its standard input.
    """
    is_linux = sys.platform == "linux"
    if is_linux:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()
    # A pipe wakes `select` when a child ends or a signal comes.
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    child = os.fork()
    if child == 0:
        _become(limits, source, words, own if is_linux else None)
    with contextlib.suppress(OSError):  # by both, since either may run first; it fails once the command runs
        os.setpgid(child, child)
    code = _wait(child, woken)
    _end_group(child)
    while is_linux and (left := _children(own)):
        for pid in left:
            _signal(pid)
        _reap()
    return code


def _become(limits: "dict[str, int]", source: str, words: "list[str]", parent: "int | None") -> None:
    """Replace this process by the command."""
    try:
        os.setpgid(0, 0)
        if parent is not None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(_NOT_STARTED)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        file = os.open(source, os.O_RDONLY)
        os.dup2(file, 0)
        os.close(file)
        for name, most in limits.items():
            number = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(number)[1]
            value = most if hard == resource.RLIM_INFINITY else min(most, hard)
            # Beyond its CPU seconds a process gets SIGXCPU, and only later SIGKILL, which would not say why.
            resource.setrlimit(number, (value, hard if name == "CPU" else value))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        os.execvpe(words[0], words, environment)
    except (OSError, ValueError) as error:
        os.write(2, f"{words[0]}: {getattr(error, 'strerror', None) or error}\n".encode(errors="replace"))
    os._exit(_NOT_STARTED)


def _wait(child: int, woken: int) -> int:
    """Wait until the command ends, or until it is to be ended; return its exit code."""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        is_over = 0 in ready and not os.read(0, 1)
        if woken in ready:
            is_over |= signal.SIGTERM in os.read(woken, 512)
        if is_over:
            _end_group(child)
        pid, status = os.waitpid(child, 0 if is_over else os.WNOHANG)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        _reap_others(child)


def _end_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _children(own: int) -> "list[int]":
    """Return the processes that this one is the parent of, by now: those that lost theirs became its children."""
    try:
        return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text(encoding="ascii").split()]
    except OSError:  # a kernel without this file
        return []


def _reap() -> None:
    """Wait for the end of one child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)


def _reap_others(child: int) -> None:
    """Collect processes that became this one's children and have ended; those of the command end by themselves."""
    for pid in _children(os.getpid()):
        if pid != child:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]))
