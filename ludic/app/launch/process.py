"""Stop long-running work cleanly on signals, and end it with the process that started it."""

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from ludic.base import STOP_WITHIN_S, folder_of_object, signal_when_parent_ends
from ludic.errors import StopNowInterrupt

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
"""Environment variables of all processes. Some reasoning-gym generators draw in the order of a set, which the hash seed
decides. Progress bars of libraries would fill the log files; that of the Hub is transformers' switch, too."""

SUPERVISED = "LUDIC_SUPERVISED"
"""Environment variable, set for children of `ludic run`: they stop when their standard input closes, as it ends."""

LAUNCHER = "LUDIC_LAUNCHER"
"""Environment variable, set for the ranks of `ludic train --ranks`: process id of the torchrun that starts them."""

STOP_WITHIN = "LUDIC_STOP_WITHIN_S"
"""Environment variable: seconds that this process and those that it starts have to stop cleanly after SIGTERM, such as
to finish a step and write a checkpoint. A process that starts others sets it for them, and waits as long before it
kills them."""

_TORCHRUN_STOP_WITHIN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torchrun: seconds between SIGTERM and SIGKILL to its ranks."""

KILL_AFTER_S = 15.0
"""Seconds beyond the time to stop until a process that starts others kills them; torchrun kills its ranks first."""

_LAST_WORDS_S = 5.0
"""Seconds until a process that can't end itself after that time is ended with the stacks of its threads, and as many
again until the kernel ends it."""
_POLL_S = 1.0


def stop_variables(within_s: int) -> dict[str, str]:
    """Return the environment variables that give processes, torchrun's ranks included, this number of seconds to
    stop."""
    return {STOP_WITHIN: str(within_s), _TORCHRUN_STOP_WITHIN: str(within_s)}


def stop_within_s(environment: Mapping[str, str] = os.environ) -> int:
    """Return the seconds to stop cleanly of a process with this environment."""
    return int(environment.get(STOP_WITHIN) or STOP_WITHIN_S)


class ProcessStop(threading.Event):
    """Asks this whole process to stop, which does one thing: a call that hangs may end it."""


def stop_on_signals() -> ProcessStop:
    """Return an event that SIGTERM and Ctrl-C set; a second Ctrl-C interrupts at once.

    In a child of `ludic run` or a rank of torchrun, the event is also set when the parent is gone; the process is ended
    if it does not stop within a grace period.
    """
    stop = ProcessStop()
    _set_on_signals(stop)
    if is_supervised():
        _end_after(_wait_for_end_of_input, stop)
    if _is_rank():
        signal_when_parent_ends(signal.SIGTERM)
        _end_after(_wait_for_end_of_launcher, stop)
    return stop


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set during the block; for work started by a notebook or a script.

    After such a signal the block should end soon, and KeyboardInterrupt is raised at its end. A second Ctrl-C
    interrupts the block at once. Only the main thread can handle signals: in another one the event is never set.
    """
    stop, is_signalled = threading.Event(), threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = _set_on_signals(stop, is_signalled)
    if is_supervised():
        _end_after(_wait_for_end_of_input, stop)
    if _is_rank():
        _end_after(_wait_for_end_of_launcher, stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if is_signalled.is_set():
        raise KeyboardInterrupt


def interruptible_unless(stop: threading.Event | None) -> AbstractContextManager[threading.Event]:
    """Yield the caller's event, or one that Ctrl-C sets, as `interruptible` does."""
    return interruptible() if stop is None else nullcontext(stop)


def _set_on_signals(*events: threading.Event) -> dict[signal.Signals, Any]:
    """Let SIGTERM and Ctrl-C set events, and a second Ctrl-C interrupt; returns the handlers that were there before."""

    def ask_to_stop(number: int, frame: object) -> None:
        if events[0].is_set() and number == signal.SIGINT:
            raise StopNowInterrupt
        if _is_rank():
            _end_by_kernel()
        for event in events:
            event.set()

    return {number: signal.signal(number, ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}


def is_supervised() -> bool:
    """Return whether `ludic run` started this process."""
    return bool(os.environ.get(SUPERVISED))


def _is_rank() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that a supervisor stops its children either way."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _end_after(wait: Callable[[], None], stop: threading.Event) -> None:
    """Set `stop` once `wait` returns; end this process if it does not stop, such as in an endless loop."""

    def end() -> None:
        wait()
        stop.set()
        # Works without Python, in case another thread holds the interpreter lock or stderr blocks.
        grace_s = stop_within_s()
        faulthandler.dump_traceback_later(grace_s + _LAST_WORDS_S, exit=True, file=2)
        time.sleep(grace_s)
        with suppress(OSError):
            print(f"ludic: the parent process ended {grace_s} s ago, so this one ends", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _wait_for_end_of_input() -> None:
    # Do not use sys.stdin's reader: its lock would be held when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass


def _wait_for_end_of_launcher() -> None:
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    _end_by_kernel()


def _end_by_kernel() -> None:
    """Let the kernel end this rank some time after it should have stopped, unless it has ended.

    A rank whose peers are gone may hang in the destructors of C++, after the interpreter and all its threads ended.
    torchrun, while it lives, kills its ranks in the same way.
    """
    signal.alarm(math.ceil(stop_within_s() + 2 * _LAST_WORDS_S))


# --- Settings of the processes ---------------------------------------------------------------------------------------
# Settings of the processes that ludic starts here: one JSON file each, which the process reads with --config.
#
# Arguments would be parsed again, have a largest length and are shown to all users of the machine. The files are in a
# private temporary folder (ludic.base.temporary), which is deleted when the process that made it ends, or by the next
# one if it was killed. A restarted process gets a new file. Files for clusters (ludic.adapters.clusters) hold flags
# instead:
# people read and change them, and an additional file would have to reach every machine.


def config_args(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Write a process's settings, by the names of its flags; return the arguments that name the file.

    name: of the process, for people. The file's name ends with a digest of the settings, so a process that has not read
    its file yet never finds those of another.
    """
    text = json.dumps(dict(settings), indent=1)
    if not _files_of(os.getpid()).folder.is_dir():  # a cleaner of temporary folders may delete it during a run of days
        _files_of.cache_clear()
    path = _files_of(os.getpid()).folder / f"{name}-{sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


class _Files:
    """The folder of this process's files, which is deleted with it."""

    def __init__(self) -> None:
        self.folder: Path = folder_of_object("config", self)


@cache
def _files_of(pid: int) -> _Files:
    """pid: a forked process gets a folder of its own."""
    return _Files()
