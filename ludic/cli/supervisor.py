"""Processes on this machine, started, watched, and started again when they die."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ludic.cli.process import SUPERVISED
from ludic.errors import LudicError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_WITHIN_S = 60.0
_MOST_QUICK_DEATHS = 3
_QUICK_S = 20.0


class ChildError(LudicError, RuntimeError):
    """A process died again and again."""


@dataclass(slots=True, kw_only=True)
class Child:
    """One process and its history."""

    name: str
    args: Callable[[], Sequence[str]]
    """What follows `python -m`, asked for before each life; what it raises ends the supervision."""
    log: Path
    """Its stdout and stderr, over all its lives."""
    num_restarts: int = 0
    _quick_deaths: int = 0
    _started: float = 0.0
    _process: subprocess.Popen | None = field(default=None, repr=False)

    def start(self, environment: dict[str, str]) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        args = self.args()
        self._started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *args],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment | {SUPERVISED: "1"},
                # Ctrl-C is for us to pass on, as SIGTERM; and what a child starts can be killed with it.
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen:
        assert self._process is not None
        return self._process

    def restart(self, environment: dict[str, str]) -> None:
        """Raises ChildError when it died soon after its start several times in a row."""
        # Who is killed from outside may live as shortly as the killer likes.
        code = self.process.returncode
        killed = code in (-signal.SIGKILL, -signal.SIGTERM)
        quick = time.monotonic() - self._started < _QUICK_S and not killed
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        if self._quick_deaths >= _MOST_QUICK_DEATHS:
            raise ChildError(f"{self.name} died {self._quick_deaths} times soon after its start: {self.last_words()}")
        self.kill_rest()
        self.num_restarts += 1
        self.start(environment)
        logger.warning("%s ended with %s; started again", self.name, code)

    def kill_rest(self) -> None:
        """Kill it, and what it started and left behind, such as the ranks of a torchrun that was killed."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line of its log, and where that is."""
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["(no output)"]
        return f"{lines[-1]} ({self.log} has more)"


def supervise(main: Child, others: Sequence[Child], *, environment: dict[str, str], tick: Callable[[], None]) -> None:
    """Run all until `main` ends well; whoever else ends is started again. Then, or on an error, all are stopped.

    `tick` is called some times a second. Raises ChildError, and KeyboardInterrupt after stopping all.
    """
    children = [main, *others]
    try:
        for child in children:
            child.start(environment)
        while main.process.poll() != 0:
            for child in children:
                if child.process.poll() is not None:
                    child.restart(environment)
            tick()
            time.sleep(_POLL_S)
    finally:
        _stop(children)
    tick()


def _stop(children: Sequence[Child]) -> None:
    """SIGTERM, so that all is flushed; SIGKILL for who does not listen."""
    started = [child for child in children if child._process is not None]
    for child in started:
        child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_WITHIN_S
    for child in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.1, deadline - time.monotonic()))
        child.kill_rest()
        child.process.wait()
        if child.process.stdin:
            child.process.stdin.close()
