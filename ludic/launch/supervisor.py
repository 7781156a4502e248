"""Start and watch processes on this machine, and restart those that die.

A process that ends with LASTING_EXIT_CODE, or for wrong usage, is not restarted, since a new start would fail with the
same error. Raises ChildError for it, and after repeated deaths.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from ludic.children import start_python
from ludic.errors import DETAIL_INDENT, LASTING_EXIT_CODE, LudicError, SlotTakenError
from ludic.launch.process import KILL_AFTER_S, SUPERVISED, stop_within_s
from ludic.launch.start_server import ForkedProcess, StartServer
from ludic.masking import mask
from ludic.settings import SettingsError
from ludic.store.local import open_to_append, refuse_linked_log
from ludic.temporary import in_temporary, private_folder

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_MOST_DEATHS = 3
"""Consecutive deaths, each soon after the start or with the same last line, after which the supervision ends."""
_QUICK_S = 20.0
_REST_S = 60.0
"""Seconds between the starts of such a process, if the run continues without it."""
_HEALTHY_S = 3600.0
"""Seconds of life that reset the count of deaths."""
_TIME = re.compile(r"^\d\d:\d\d:\d\d ")
"""Time at the start of a logged line, which differs between deaths."""
_REASON = re.compile(r"^(?:\d\d:\d\d:\d\d )?(?:ludic: |\[rank\d+\]: )")
"""Start of a line with the reason of a death; torchrun's report, which is always the same, comes after it."""
_LASTING = (LASTING_EXIT_CODE, SettingsError.exit_code)
_LASTING_RANK = re.compile(rf"^\s*exitcode\s*: {LASTING_EXIT_CODE}\b")
"""Line of torchrun's report, whose own exit status does not tell how its ranks ended."""
_LETTER = re.compile(r"[^\W\d_]")
_LOOK_EVERY_S = 2.0


class ChildError(LudicError, RuntimeError):
    """A process died repeatedly, or from an error that a new start would meet again."""


@dataclass(slots=True, kw_only=True)
class Child:
    """One process and its history."""

    name: str
    args: Callable[[], Sequence[str]]
    """Returns the arguments after `python -m`; called before each start. An error in it ends the supervision."""
    log: Path
    """File of its stdout and stderr, over all restarts. Neither it nor its folder may be a symbolic link."""
    is_free: Callable[[], bool] = lambda: True
    """Returns whether the process that replaced this one has ended; called every 2 s after an exit with
    the status of SlotTakenError."""
    was_replaced: Callable[[int], bool] = lambda pid: True
    """Returns whether another process replaced this one, given its process id; called after an
    exit with the status of SlotTakenError."""
    progress: Callable[[], object] = lambda: None
    """Returns a value that progress changes, such as the newest checkpoint's step; a change resets the count."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of this process, besides those of all children."""
    may_fork: bool = False
    """True if it may be forked from the start server; otherwise, or if that fails, it is started as a new
    interpreter."""
    is_aside: bool = False
    """True if the others continue without it: it ends at an exit with 0 or a lasting error, and repeated deaths only
    delay its next start."""
    num_restarts: int = 0
    _quick_deaths: int = 0
    _deaths_alike: int = 0
    _words: str | None = None
    """Last line before the last death, without the time."""
    _log_start: int = 0
    """Byte offset in the log at the last start."""
    _started: float = 0.0
    _progress: object = None
    """Value of `progress` at the last start."""
    _replaced: bool | None = None
    """Result of `was_replaced`; None before it is called."""
    _is_given_up: bool = False
    """True if the others continue without it and a lasting error ended it."""
    _looked: float = 0.0
    _process: subprocess.Popen | ForkedProcess | None = field(default=None, repr=False)

    def start(self, environment: Mapping[str, str], server: StartServer | None = None) -> None:
        args, variables = self.args(), {**os.environ, **environment, **self.environment, SUPERVISED: "1"}
        self._started, self._progress, self._replaced = time.monotonic(), self.progress(), None
        make_log_folder(self.log.parent)
        with open_to_append(self.log) as log:
            self._log_start = log.tell()
            forked = server.start(args, variables, log) if server is not None and self.may_fork else None
            self._process = forked or start_python(
                ["-m", *args],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                environment=variables,
                # A new session: Ctrl-C is passed on as SIGTERM, and a child can be killed with its own processes.
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen | ForkedProcess:
        assert self._process is not None
        return self._process

    def is_due(self) -> bool:
        """Return True if it has ended and is to be restarted now."""
        if self.is_aside:
            is_resting = self._is_dying() and time.monotonic() - self._started < _REST_S
            return self.process.returncode != 0 and not is_resting and not self._is_given_up
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
            self._replaced = self.process.returncode == SlotTakenError.exit_code and self.was_replaced(self.process.pid)
        return self._replaced

    def restart(self, environment: Mapping[str, str], server: StartServer | None = None) -> None:
        """Restart it, and log how it ended.

        Raises ChildError after an error that a new start would meet again, and after 3 consecutive deaths, soon after
        the start or with the same last line.
        """
        code = self.process.returncode
        if self._is_mistaken():
            said = _REASON.sub("", mask(self._last_line()))
            self._give_up(f"{said} ({self.name} ended with {code} and is not started again; {self.log} has more)")
            return
        self._count_death()
        if self._is_dying():
            how = "soon after its start" if self._quick_deaths >= _MOST_DEATHS else "with the same last words"
            deaths = max(self._quick_deaths, self._deaths_alike)
            said = f"{self.name} died {deaths} times {how}: {self.last_words()}"
            if not self.is_aside:
                raise ChildError(said)
            logger.warning("%s; it is restarted every %g s, and the others continue", said, _REST_S)
        words = self.last_words()
        self.kill_rest()
        self.num_restarts += 1
        self.start(environment, server)
        logger.warning("%s ended with %s; started again; its last words: %s", self.name, code, words)

    def _is_mistaken(self) -> bool:
        return self.process.returncode in _LASTING or any(map(_LASTING_RANK.search, self._lines()))

    def _give_up(self, said: str) -> None:
        if not self.is_aside:
            error = ChildError(said)
            error.detail = self._detail()
            raise error
        self._is_given_up = True
        logger.warning("%s; the others continue", said)

    def _is_dying(self) -> bool:
        return max(self._quick_deaths, self._deaths_alike) >= _MOST_DEATHS

    def _count_death(self) -> None:
        # Deaths by a kill from outside, or by replacement, are not counted.
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
        """Kill its process group, with processes it left behind, such as the ranks of a torchrun that was killed."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin:
            self.process.stdin.close()

    def last_words(self) -> str:
        """Return the log line with the reason of its last death, without secrets, and the path of the log."""
        return f"{mask(self._last_line())} ({self.log} has more)"

    def _last_line(self) -> str:
        lines = self._lines()[::-1]
        chosen = next(filter(_REASON.search, lines), None) or next(filter(_LETTER.search, lines), "(no output)")
        return chosen.strip()

    def _detail(self) -> str | None:
        """Return the indented lines after the line with the reason; None if there are none."""
        lines = self._lines()
        start = max((index + 1 for index, line in enumerate(lines) if _REASON.search(line)), default=len(lines))
        found = list(takewhile(lambda line: line.startswith(DETAIL_INDENT), lines[start:]))
        return "\n".join(line.removeprefix(DETAIL_INDENT) for line in found) or None

    def _lines(self) -> list[str]:
        """Return the lines of the log since the last start."""
        with (
            contextlib.suppress(FileNotFoundError),
            self.log.open("rb") as log,
        ):  # the log was deleted, perhaps with the root
            log.seek(self._log_start)
            return log.read().decode(errors="replace").splitlines()
        return []


def make_log_folder(folder: Path) -> None:
    """Create the folder of a log before each start; a private one if other users may create folders beside it.

    Raises SchemaError if it is a symbolic link, StoreError if another user may have made it.
    """
    if in_temporary(folder):
        private_folder(folder.name)
    else:
        refuse_linked_log(folder)
        folder.mkdir(parents=True, exist_ok=True)


def supervise(
    main: Child,
    others: Sequence[Child],
    *,
    environment: Mapping[str, str],
    tick: Callable[[], None],
    server: StartServer | None = None,
) -> None:
    """Run all children until `main` exits with 0; restart those that end before. Then, or on an error, stop all.

    `tick` is called several times a second. server: forks children that may be forked. Raises ChildError, and
    KeyboardInterrupt after stopping all.
    """
    children = [main, *others]
    try:
        for child in children:
            child.start(environment, server)
        while main.process.poll() != 0:
            for child in children:
                if child.process.poll() is not None and child.is_due():
                    child.restart(environment, server)
            tick()
            time.sleep(_POLL_S)
    finally:
        stop_children(children, environment)
    tick()


def finish(
    child: Child,
    *,
    environment: Mapping[str, str],
    tick: Callable[[], None],
    server: StartServer | None = None,
) -> None:
    """Run an optional child to its end, in a new life, after the others; does nothing if it has ended with 0.

    server: forks it if possible. Raises ChildError as `Child.restart` does, and KeyboardInterrupt after stopping it.
    """
    if child._process is None or child.process.returncode != 0:
        alone = replace(child, is_aside=False, _quick_deaths=0, _deaths_alike=0, _is_given_up=False)
        supervise(alone, [], environment=environment, tick=tick, server=server)


def stop_children(children: Sequence[Child], environment: Mapping[str, str]) -> None:
    """Send SIGTERM, so that children stop cleanly; send SIGKILL to children that do not end within their time to stop.

    environment: variables that the children were started with, besides those of this process.
    """
    started = [child for child in children if child._process is not None]
    for child in started:
        child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + stop_within_s({**os.environ, **environment}) + KILL_AFTER_S
    for child in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.1, deadline - time.monotonic()))
        child.kill_rest()
        child.process.wait()
