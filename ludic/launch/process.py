"""Helpers of long-running commands: stop cleanly on signals, and end with the process that started them."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

SUPERVISED = "LUDIC_SUPERVISED"
"""Environment variable, set for children of `ludic run`: they stop when their standard input closes, as it ends."""

LAUNCHER = "LUDIC_LAUNCHER"
"""Environment variable, set for the ranks of `ludic train --ranks`: process id of the torchrun that starts them."""

REPLACED = 93
"""Exit status of a worker whose slot another worker took. The supervisor waits until the other worker has ended.

Other programs rarely use it, and it counts only if the slot has a newer claim."""

_GRACE_S = 30.0
"""Seconds in which a process whose parent is gone may stop cleanly: flush, or write a checkpoint."""
_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and Ctrl-C set; a second Ctrl-C interrupts at once.

    In a child of `ludic run` or a rank of torchrun, the event is also set when the parent is gone; the process is ended
    if it does not stop within a grace period.
    """
    stop = threading.Event()

    def ask_to_stop(number: int, frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    if os.environ.get(SUPERVISED):
        _end_after(_wait_for_end_of_input, stop)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _ask_for_signal_when_parent_ends()
        _end_after(_wait_for_end_of_launcher, stop)
    return stop


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that a supervisor stops its children either way."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _end_after(wait: Callable[[], None], stop: threading.Event) -> None:
    """Set `stop` once `wait` returns; end this process if it does not stop, such as in an endless loop."""

    def end() -> None:
        wait()
        stop.set()
        time.sleep(_GRACE_S)
        print(f"ludic: the parent process ended {_GRACE_S:g} s ago, so this one ends", file=sys.stderr, flush=True)
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


def _ask_for_signal_when_parent_ends() -> None:
    """Request SIGTERM for when the parent's starting thread ends, in torchrun the main thread. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
