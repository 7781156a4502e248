"""What the long-running commands share: stopping cleanly, and not outliving the process that started them."""

import os
import signal
import sys
import threading

SUPERVISED = "LUDIC_SUPERVISED"
"""Set for children of `ludic run`: they stop when their standard input closes, so that none outlives it."""


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set; a second Ctrl-C interrupts at once."""
    stop = threading.Event()

    def ask_to_stop(number: int, frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    if os.environ.get(SUPERVISED):
        threading.Thread(target=_stop_with_parent, args=(stop,), daemon=True).start()
    return stop


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that a supervisor stops its children either way."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _stop_with_parent(stop: threading.Event) -> None:
    # Not sys.stdin's own reader: its lock would be held at the end of the interpreter.
    while os.read(sys.stdin.fileno(), 1):
        pass
    stop.set()
