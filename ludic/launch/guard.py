"""Watch a worker from another process, and end it when a call of its environment can't be interrupted.

C code that holds Python's lock stops every thread of its process, so the guard is a separate process. It reads lines
from its standard input: `+7 NAME` when call number 7 begins, `-7` when it ends. The guard ends with its input, and
names the call in which the worker ended, such as one that calls os._exit.
"""

import contextlib
import itertools
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

_GRACE_S = 10.0
"""Seconds between the limit, when the call is interrupted, and the end of the worker, if the call continues."""
_MOST_NAMES = 3
"""Calls that are named, of those that go on; one of them holds Python's lock."""


@contextlib.contextmanager
def guarded(timeout_s: float | None) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Start a process that ends this one when a call takes too long. Gives the function that announces calls to it.

    That function returns another one, which says that the call has ended.
    """
    if timeout_s is None:
        yield lambda call: lambda: None
        return
    from ludic.children import start_python  # the guard itself, which runs this file, has no packages

    # Isolated from the user's folders and packages; the terminal's Ctrl-C does not reach it.
    args = ["-I", "-S", __file__, str(os.getpid()), str(timeout_s + _GRACE_S)]
    with start_python(args, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        yield partial(_announce, process.stdin.fileno(), itertools.count())


def _announce(pipe: int, numbers: Iterator[int], call: str) -> Callable[[], None]:
    number = next(numbers)
    _tell(pipe, f"+{number} {' '.join(call.splitlines())}")
    return partial(_tell, pipe, f"-{number}")


def _tell(pipe: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the worker continues if its guard was killed
        os.write(pipe, line.encode(errors="replace") + b"\n")


def watch(worker: int, limit_s: float) -> None:
    """Read calls from standard input until it ends; kill the worker if a call takes longer than `limit_s`."""
    rest, calls = b"", dict[bytes, tuple[float, str]]()  # the time of each call's end, and its name; the oldest first
    late: list[str] = []
    told = time.monotonic()
    while not late:
        # A line that was told shows that Python's lock is free: what waits is ended by its own limit, if late.
        next_end = max(told + limit_s, min(ends for ends, _ in calls.values())) if calls else math.inf
        # What was told meanwhile counts, so this looks once more when the time is over.
        if select.select([0], [], [], max(0.0, next_end - time.monotonic()) if calls else None)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                if calls:  # else it has ended by itself
                    _, newest = list(calls.values())[-1]  # a blocking call begins last
                    print(f"ludic: the worker ended during a call: {newest}", file=sys.stderr, flush=True)
                return
            told = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                number, _, name = line[1:].partition(b" ")
                if line.startswith(b"+"):
                    calls[number] = told + limit_s, name.decode(errors="replace")
                else:
                    calls.pop(number, None)
        else:
            late = [name for ends, name in calls.values() if ends <= time.monotonic()]
    names = " and ".join(dict.fromkeys(late[:_MOST_NAMES])) + (" and others" if late[_MOST_NAMES:] else "")
    print(f"ludic: {names} went on after {limit_s:g} s, so this worker ends", file=sys.stderr, flush=True)
    # Not SIGKILL: a supervisor treats that as a kill by the user, and would restart the worker without limit.
    os.kill(worker, signal.SIGABRT)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
