"""What the long-running commands share: stopping cleanly, and not outliving the process that started them."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

SUPERVISED = "LUDIC_SUPERVISED"
"""Set for children of `ludic run`: they stop when their standard input closes, so that none outlives it."""

LAUNCHER = "LUDIC_LAUNCHER"
"""Set for the ranks of `ludic train --ranks`: process id of the torchrun that starts them."""

REPLACED = 93
"""Exit status of a worker whose slot another one took: who started it waits until that one has ended.

Seldom the status of anything else, and believed only where the slot has a newer claim."""

_GRACE_S = 30.0
"""Seconds in which a process whose parent is gone may stop by itself: flush, or write a checkpoint."""
_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set; a second Ctrl-C interrupts at once.

    A child of `ludic run`, and a rank of torchrun, also stops when its parent is gone, and ends if that takes long.
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
    """Once `wait` returns, set `stop`; end this process if it then lives on, such as in an endless loop."""

    def end() -> None:
        wait()
        stop.set()
        time.sleep(_GRACE_S)
        print(f"ludic: the parent process ended {_GRACE_S:g} s ago, so this one ends", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _wait_for_end_of_input() -> None:
    # Not sys.stdin's own reader: its lock would be held at the end of the interpreter.
    while os.read(sys.stdin.fileno(), 1):
        pass


def _wait_for_end_of_launcher() -> None:
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    while os.getppid() == launcher:
        time.sleep(_POLL_S)


def _ask_for_signal_when_parent_ends() -> None:
    """SIGTERM when the parent's starting thread ends, which in torchrun is the main one; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
