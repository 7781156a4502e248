"""Watch a worker from a separate process, and end it when a call of its environment can't be interrupted.

C code that holds Python's lock stops every thread of its process, so the guard is a separate process. Calls in progress
are recorded in shared memory, at a cost of a microsecond per call. The guard ends when its standard input closes, and
names the call in which the worker ended, such as one that calls os._exit.
"""

import contextlib
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

_GRACE_S = 10.0
"""Seconds between the limit, when the call is interrupted, and the end of the worker, if the call continues."""
_MOST_NAMES = 3
"""Maximum calls in progress that are named; one of them holds Python's lock."""
_HEAD = struct.Struct("d")
"""Seconds of time.monotonic(), which is one clock for all processes. At the start of a page: time when a call last
began or ended there. At the start of a call: time when it began, or 0."""
_CALL_BYTES = 256
"""Bytes of a call: its starting time, and its name in UTF-8, which may be cut, up to a zero byte."""
_PAGE_CALLS = 1024
_PAGE_BYTES = _PAGE_CALLS * _CALL_BYTES
"""The first place of a page has its own head instead of a call."""


@contextlib.contextmanager
def guarded(timeout_s: float | None) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Start a process that ends this one when a call takes too long. Yields the function that announces calls to it.

    That function returns another one, which reports the end of the call.
    """
    if timeout_s is None:
        yield lambda call: lambda: None
        return
    from ludic.base import start_python  # not at the top: the guard, which runs this file, has no packages

    with _shared_file() as shared:
        board = _Board(shared.fileno())
        # Isolated from the user's folders and packages; the terminal's Ctrl-C does not reach it.
        args = ["-I", "-S", __file__, str(os.getpid()), str(timeout_s + _GRACE_S), str(shared.fileno())]
        with start_python(args, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[shared.fileno()]):
            yield board.begin


def _shared_file() -> BinaryIO:
    """Open a file without a name, in memory if the system supports that."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("ludic-calls"), "r+b")
    import tempfile  # imports much, which the guard does not need

    return tempfile.TemporaryFile()


class _Board:
    """The calls in progress, in a file that the guard reads; it grows by pages."""

    def __init__(self, file: int) -> None:
        self._file, self._num_pages, self._taking = file, 0, threading.Lock()
        self._free = list[tuple[mmap.mmap, int]]()
        self._grow()

    def _grow(self) -> None:
        end = self._num_pages * _PAGE_BYTES
        # Allocate the page now: a later write to mapped memory without room on the disk would end the process.
        os.pwrite(self._file, bytes(_PAGE_BYTES), end)
        self._num_pages += 1
        page = mmap.mmap(self._file, _PAGE_BYTES, offset=end)
        self._free.extend((page, slot * _CALL_BYTES) for slot in range(1, _PAGE_CALLS))

    def begin(self, call: str) -> Callable[[], None]:
        """Add a call of any thread; return the function that removes it."""
        with self._taking:
            if not self._free:
                self._grow()
            page, start = self._free.pop()
        name = " ".join(call.splitlines()).encode(errors="replace")[: _CALL_BYTES - _HEAD.size - 1] + b"\0"
        page[start + _HEAD.size : start + _HEAD.size + len(name)] = name
        now = time.monotonic()
        _HEAD.pack_into(page, start, now)
        _HEAD.pack_into(page, 0, now)
        return partial(self._end, page, start)

    def _end(self, page: mmap.mmap, start: int) -> None:
        _HEAD.pack_into(page, start, 0.0)
        _HEAD.pack_into(page, 0, time.monotonic())
        self._free.append((page, start))


def _look(file: int) -> tuple[float, list[tuple[float, str]]]:
    """Return the time when a call last began or ended, and the calls in progress: start and name of each, oldest
    first."""
    data = os.pread(file, os.fstat(file).st_size, 0)
    last_change, calls = 0.0, list[tuple[float, str]]()
    for page in range(0, len(data), _PAGE_BYTES):
        last_change = max(last_change, *_HEAD.unpack_from(data, page))
        for start in range(page + _CALL_BYTES, page + _PAGE_BYTES, _CALL_BYTES):
            (began,) = _HEAD.unpack_from(data, start)
            if began:
                name, _, _ = data[start + _HEAD.size : start + _CALL_BYTES].partition(b"\0")
                calls.append((began, name.decode(errors="replace")))
    return last_change, sorted(calls)


def watch(worker: int, limit_s: float, file: int) -> None:
    """Check the calls until standard input ends; kill the worker if a call takes longer than `limit_s`."""
    late: list[str] = []
    wait_s = limit_s  # no call that begins later is late before then
    while not late:
        ended = select.select([0], [], [], wait_s)[0]
        last_change, calls = _look(file)
        if ended:
            if calls:  # otherwise it has ended normally
                print(f"ludic: the worker ended during a call: {calls[-1][1]}", file=sys.stderr, flush=True)
            return
        # A call that began or ended shows that Python's lock is free, so late calls end by their own limits.
        now = time.monotonic()
        if calls and now >= max(last_change, calls[0][0]) + limit_s:
            late = [name for began, name in calls if began + limit_s <= now]
        next_end = max(last_change, calls[0][0]) if calls else now
        wait_s = max(0.0, next_end + limit_s - now)
    names = " and ".join(dict.fromkeys(late[:_MOST_NAMES])) + (" and others" if late[_MOST_NAMES:] else "")
    print(f"ludic: {names} did not end within {limit_s:g} s, so this worker ends", file=sys.stderr, flush=True)
    # Not SIGKILL: a supervisor treats that as a kill by the user, and would restart the worker without limit.
    os.kill(worker, signal.SIGABRT)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
