"""Watch a worker from outside, and end it when a call of its environment can't be interrupted.

A call that holds Python's lock in C stops every thread of its process, so the guard is a process of its own. It reads
its standard input: a line as a call begins, an empty line when it is over. It ends when its input does.
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
"""Seconds from the limit, at which a call is interrupted, to the end of a worker whose call went on."""


@contextlib.contextmanager
def guarded(timeout_s: float | None) -> Iterator[Callable[[str], None]]:
    """A process that ends this one when a call takes too long; gives the function that tells it of calls."""
    if timeout_s is None:
        yield lambda call: None
        return
    # Isolated from the user's folders and packages; no Ctrl-C of the terminal reaches it.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(timeout_s + _GRACE_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        yield partial(_tell, process.stdin.fileno())


def _tell(pipe: int, call: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a guard that was killed is missed by nobody
        os.write(pipe, " ".join(call.splitlines()).encode(errors="replace") + b"\n")


def watch(worker: int, limit_s: float) -> None:
    """Follow the calls on standard input until it ends; kill the worker when one takes longer than `limit_s`."""
    rest, call = b"", b""
    while select.select([0], [], [], limit_s if call else None)[0]:
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        call = lines[-1] if lines else call
    print(f"ludic: {call.decode()} went on after {limit_s:g} s, so this worker ends", file=sys.stderr, flush=True)
    # Not SIGKILL: a supervisor takes that for somebody's wish, and starts the worker again and again.
    os.kill(worker, signal.SIGABRT)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
