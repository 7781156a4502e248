"""Processes on this machine, started, watched, and started again when they die."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ludic.cli.process import REPLACED, SUPERVISED
from ludic.errors import LudicError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_WITHIN_S = 60.0
_MOST_DEATHS = 3
"""In a row, soon after the start or with the same last words."""
_QUICK_S = 20.0
_HEALTHY_S = 3600.0
"""A life as long as this ends a row of deaths."""
_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
"""Begin of a logged line, which is another each time."""
_REASON = re.compile(r"^(?:\d\d:\d\d:\d\d )?(?:ludic: |\[rank\d+\]: )")
"""Begin of a line that says why a process or a rank ended; torchrun's report, the same each time, comes after it."""
_LETTER = re.compile(r"[^\W\d_]")
_LOOK_EVERY_S = 2.0


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
    is_free: Callable[[], bool] = lambda: True
    """Whether a process that took this one's part has ended; asked, now and then, once this one ended as REPLACED."""
    was_replaced: Callable[[int], bool] = lambda pid: True
    """Whether another process took this one's part, by its process id; asked once it ended as REPLACED."""
    progress: Callable[[], object] = lambda: None
    """What a healthy life changes, such as the step of the newest checkpoint; that ends a row of deaths."""
    num_restarts: int = 0
    _quick_deaths: int = 0
    _deaths_alike: int = 0
    _words: str | None = None
    """Of the last death, without the time."""
    _log_start: int = 0
    """Where in the log this life begins."""
    _started: float = 0.0
    _progress: object = None
    """At the start of this life."""
    _replaced: bool | None = None
    """None until it is asked."""
    _looked: float = 0.0
    _process: subprocess.Popen | None = field(default=None, repr=False)

    def start(self, environment: dict[str, str]) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        args = self.args()
        self._started, self._progress, self._replaced = time.monotonic(), self.progress(), None
        with self.log.open("ab") as log:
            self._log_start = log.tell()
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

    def is_due(self) -> bool:
        """Whether to start it again now, after it ended."""
        if not self._is_replaced():
            return True
        if time.monotonic() - self._looked < _LOOK_EVERY_S:
            return False
        if self._looked < self._started:
            logger.warning("%s was replaced and waits: %s", self.name, self.last_words())
        self._looked = time.monotonic()
        return self.is_free()

    def _is_replaced(self) -> bool:
        if self._replaced is None:
            self._replaced = self.process.returncode == REPLACED and self.was_replaced(self.process.pid)
        return self._replaced

    def restart(self, environment: dict[str, str]) -> None:
        """Raises ChildError when it died several times in a row soon after its start, or with the same last words."""
        code = self.process.returncode
        self._count_death()
        if self._quick_deaths >= _MOST_DEATHS:
            raise ChildError(f"{self.name} died {self._quick_deaths} times soon after its start: {self.last_words()}")
        if self._deaths_alike >= _MOST_DEATHS:
            raise ChildError(
                f"{self.name} died {self._deaths_alike} times with the same last words: {self.last_words()}"
            )
        self.kill_rest()
        self.num_restarts += 1
        self.start(environment)
        logger.warning("%s ended with %s; started again", self.name, code)

    def _count_death(self) -> None:
        # Who is killed from outside may live as shortly as the killer likes.
        if self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM) or self._is_replaced():
            self._quick_deaths = self._deaths_alike = 0
            return
        lived_s = time.monotonic() - self._started
        if lived_s >= _HEALTHY_S or self.progress() != self._progress:
            self._quick_deaths = self._deaths_alike = 0
        self._quick_deaths = self._quick_deaths + 1 if lived_s < _QUICK_S else 0
        words = _TIME.sub("", self._last_line())
        self._deaths_alike = self._deaths_alike + 1 if words == self._words else 1
        self._words = words

    def kill_rest(self) -> None:
        """Kill it, and what it started and left behind, such as the ranks of a torchrun that was killed."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin:
            self.process.stdin.close()

    def last_words(self) -> str:
        """The line of its log in this life that says why it ended, and where that is."""
        return f"{self._last_line()} ({self.log} has more)"

    def _last_line(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[::-1]
        chosen = next(filter(_REASON.search, lines), None) or next(filter(_LETTER.search, lines), "(no output)")
        return chosen.strip()


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
                if child.process.poll() is not None and child.is_due():
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
