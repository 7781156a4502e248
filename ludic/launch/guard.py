"""Watch a worker from another process, and end it when a call of its environment can't be interrupted.

C code that holds Python's lock stops every thread of its process, so the guard is a separate process. It reads lines
from its standard input: the call's name when a call begins, an empty line when it ends. The guard ends with its input.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

_GRACE_S = 10.0
"""Seconds between the limit, when the call is interrupted, and the end of the worker, if the call continues."""


@contextlib.contextmanager
def guarded(timeout_s: float | None) -> Iterator[Callable[[str], None]]:
    """Start a process that ends this one when a call takes too long. Gives the function that announces calls to it."""
    if timeout_s is None:
        yield lambda call: None
        return
    # Isolated from the user's folders and packages; the terminal's Ctrl-C does not reach it.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(timeout_s + _GRACE_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        yield partial(_tell, process.stdin.fileno())


def _tell(pipe: int, call: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the worker continues if its guard was killed
        os.write(pipe, " ".join(call.splitlines()).encode(errors="replace") + b"\n")


def watch(worker: int, limit_s: float) -> None:
    """Read calls from standard input until it ends; kill the worker if a call takes longer than `limit_s`."""
    rest, call = b"", b""
    while select.select([0], [], [], limit_s if call else None)[0]:
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        call = lines[-1] if lines else call
    print(f"ludic: {call.decode()} went on after {limit_s:g} s, so this worker ends", file=sys.stderr, flush=True)
    # Not SIGKILL: a supervisor treats that as a kill by the user, and would restart the worker without limit.
    os.kill(worker, signal.SIGABRT)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
