"""Start and watch processes on this machine, and restart those that die.

A process that ends with LASTING_EXIT_CODE, or for wrong usage, is not restarted, since a new start would fail with the
same error. Raises ProcessDiedError for it, and after repeated deaths.
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

from ludic.app.launch.fork_server import ForkedProcess, StartServer
from ludic.app.launch.process import KILL_AFTER_S, SUPERVISED, stop_within_s
from ludic.base import in_temporary, mask, private_folder, start_python
from ludic.errors import DETAIL_INDENT, LASTING_EXIT_CODE, LudicError, SlotTakenError
from ludic.root.storage import open_to_append, refuse_linked_log
from ludic.settings import SettingsError

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
_POLL_EVERY_S = 2.0


class ProcessDiedError(LudicError, RuntimeError):
    """A process died repeatedly, or from an error that a new start would meet again."""


@dataclass(slots=True, kw_only=True)
class _Life:
    """A process from one start on."""

    process: subprocess.Popen | ForkedProcess
    started: float
    progress: object
    """Value of the child's `progress` at the start."""
    log_start: int
    """Byte offset in the log at the start."""
    replaced: bool | None = None
    """Result of `was_replaced`; None before it is called."""
    looked: float | None = None
    """When `is_free` was called last; None before it is called."""


@dataclass(slots=True)
class _Deaths:
    """Deaths in a row."""

    quick: int = 0
    """Deaths soon after the start."""
    alike: int = 0
    """Deaths with the same last words."""
    words: str | None = None
    """Last line before the last death, without the time."""

    @property
    def most(self) -> int:
        return max(self.quick, self.alike)

    @property
    def are_many(self) -> bool:
        return self.most >= _MOST_DEATHS


@dataclass(slots=True, kw_only=True)
class ChildProcess:
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
    _life: _Life | None = field(default=None, repr=False)
    _deaths: _Deaths = field(default_factory=_Deaths)
    _is_given_up: bool = False
    """Whether it stood aside and a lasting mistake ended it."""

    def start(self, environment: Mapping[str, str], server: StartServer | None = None) -> None:
        args, variables = self.args(), {**os.environ, **environment, **self.environment, SUPERVISED: "1"}
        started, progress = time.monotonic(), self.progress()
        make_log_folder(self.log.parent)
        with open_to_append(self.log) as log:
            log_start = log.tell()
            forked = server.start(args, variables, log) if server is not None and self.may_fork else None
            process = forked or start_python(
                ["-m", *args],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                environment=variables,
                # A new session: Ctrl-C is passed on as SIGTERM, and a child can be killed with its own processes.
                start_new_session=True,
            )
        self._life = _Life(process=process, started=started, progress=progress, log_start=log_start)

    @property
    def life(self) -> _Life:
        """Its life since the last start."""
        assert self._life is not None
        return self._life

    @property
    def process(self) -> subprocess.Popen | ForkedProcess:
        return self.life.process

    def is_due(self) -> bool:
        """Return True if it has ended and is to be restarted now."""
        if self.is_aside:
            is_resting = self._deaths.are_many and time.monotonic() - self.life.started < _REST_S
            return self.process.returncode != 0 and not is_resting and not self._is_given_up
        if not self._is_replaced():
            return True
        if self.life.looked is None:
            logger.warning("%s was replaced and waits: %s", self.name, self.last_words())
        elif time.monotonic() - self.life.looked < _POLL_EVERY_S:
            return False
        self.life.looked = time.monotonic()
        return self.is_free()

    def _is_replaced(self) -> bool:
        life = self.life
        if life.replaced is None:
            life.replaced = life.process.returncode == SlotTakenError.exit_code and self.was_replaced(life.process.pid)
        return life.replaced

    def restart(self, environment: Mapping[str, str], server: StartServer | None = None) -> None:
        """Restart it, and log how it ended.

        Raises ProcessDiedError after a mistake that a new start would meet again, and after 3 deaths in a row, soon
        after the start or with the same last words.
        """
        code = self.process.returncode
        if self._is_mistaken():
            said = _REASON.sub("", mask(self._last_line()))
            self._give_up(f"{said} ({self.name} ended with {code} and is not started again; {self.log} has more)")
            return
        self._count_death()
        if self._deaths.are_many:
            how = "soon after its start" if self._deaths.quick >= _MOST_DEATHS else "with the same last words"
            said = f"{self.name} died {self._deaths.most} times {how}: {self.last_words()}"
            if not self.is_aside:
                raise ProcessDiedError(said)
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
            error = ProcessDiedError(said)
            error.detail = self._detail()
            raise error
        self._is_given_up = True
        logger.warning("%s; the others continue", said)

    def _count_death(self) -> None:
        deaths = self._deaths
        # Deaths by a kill from outside, or by replacement, are not counted.
        if self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM) or self._is_replaced():
            deaths.quick = deaths.alike = 0
            return
        lived_s = time.monotonic() - self.life.started
        if lived_s >= _HEALTHY_S or self.progress() != self.life.progress:
            deaths.quick = deaths.alike = 0
        deaths.quick = deaths.quick + 1 if lived_s < _QUICK_S else 0
        words = _TIME.sub("", self._last_line())
        deaths.alike = deaths.alike + 1 if words == deaths.words else 1
        deaths.words = words

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
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:  # deleted, perhaps with the root
            log.seek(0 if self._life is None else self._life.log_start)
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
    main: ChildProcess,
    others: Sequence[ChildProcess],
    *,
    environment: Mapping[str, str],
    tick: Callable[[], None],
    server: StartServer | None = None,
) -> None:
    """Run all children until `main` exits with 0; restart those that end before. Then, or on an error, stop all.

    `tick` is called several times a second. server: forks children that may be forked. Raises ProcessDiedError, and
    KeyboardInterrupt after stopping all.
    """
    processes = [main, *others]
    try:
        for child in processes:
            child.start(environment, server)
        while main.process.poll() != 0:
            for child in processes:
                if child.process.poll() is not None and child.is_due():
                    child.restart(environment, server)
            tick()
            time.sleep(_POLL_S)
    finally:
        stop_processes(processes, environment)
    tick()


def finish(
    child: ChildProcess,
    *,
    environment: Mapping[str, str],
    tick: Callable[[], None],
    server: StartServer | None = None,
) -> None:
    """Run an optional child to its end, in a new life, after the others; does nothing if it has ended with 0.

    server: forks it if that may be. Raises ProcessDiedError as `ChildProcess.restart` does, and KeyboardInterrupt after
    stopping it.
    """
    if child._life is None or child.process.returncode != 0:
        alone = replace(child, is_aside=False, _deaths=_Deaths(), _is_given_up=False)
        supervise(alone, [], environment=environment, tick=tick, server=server)


def stop_processes(processes: Sequence[ChildProcess], environment: Mapping[str, str]) -> None:
    """Send SIGTERM, so that children stop cleanly; send SIGKILL to children that do not end within their time to stop.

    environment: variables that the children were started with, besides those of this process.
    """
    started = [child for child in processes if child._life is not None]
    for child in started:
        child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + stop_within_s({**os.environ, **environment}) + KILL_AFTER_S
    for child in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.1, deadline - time.monotonic()))
        child.kill_rest()
        child.process.wait()
