"""Run the jobs of a recorder in a thread: in order, in bounded memory, and again after a failure.

A caller waits at most for its own timeout, whatever the store does: a hanging filesystem blocks only the thread. Jobs
that do not fit into memory are counted as lost.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ludic.errors import ConfigError, LudicError, ReplacedRootError, StoreError, one_line
from ludic.root.rows import FLUSH_AGE_S, FLUSH_GROUPS
from ludic.root.storage import back_off
from ludic.run.recording.life import Find, Job, LedgerStep, RecorderLife, StepNumbers, StoredRows
from ludic.run.recording.losses import Losses, Lost, Waiting

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Maximum bytes of waiting jobs; jobs beyond it are lost."""
_FILE_BYTES = 64 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
"""Seconds between two tries of a job."""
_HANGS_S = 5.0
"""Seconds without a finished job, while a caller waits, after which the store counts as hanging."""
_TRIES_AT_THE_END = 3
"""Seconds between two tries of a job while the recorder is closed."""
_LAST_WORDS_S = 2.0
_WARN_EVERY_S = 60.0


class Queue:
    """Jobs of a life, and the thread that does them. Its methods are safe from several threads."""

    def __init__(self, life: RecorderLife, where: str) -> None:
        """Start the thread, which opens the root first. where: the root, for messages."""
        self._life, self._where = life, where
        self._jobs: deque[tuple[int, Job]] = deque()
        """Waiting jobs with their numbers; the thread may be working on the first ones."""
        self._in_hand: list[Job] = []
        self._size_bytes = self._newest = self._flushed = 0
        """Bytes of the jobs; number of the newest job, and of the newest that must be done at once."""
        self._since = 0.0
        """When the first job was added."""
        self._moved_at = time.monotonic()
        """When the last job was done, or the first one was added after that."""
        self._losses = Losses()
        self._is_closing = self._is_over = False
        self._tries_left = _TRIES_AT_THE_END
        self.mistake: LudicError | None = None
        """Why this root can't be recorded into."""
        self.failure: Exception | None = None
        """The last error of the store; None since something was stored."""
        self._warned = -_WARN_EVERY_S
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ludic-record", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> Lost:
        """Final losses so far."""
        with self._changed:
            return self._losses.so_far()

    @property
    def waiting(self) -> Waiting:
        """Data that is not stored yet."""
        with self._changed:
            jobs = [job for _, job in self._jobs]
            rows = [job for job in jobs if isinstance(job, StoredRows)]
            return Waiting(
                num_rollouts=sum(job.table.num_rows for job in rows),
                num_groups=sum(len(job.group_ids) for job in rows),
                num_steps=sum(isinstance(job, LedgerStep) for job in jobs),
                reason=one_line(self.failure) if self.failure is not None else None,
            )

    def add(self, job: Job, *, patience_s: float) -> int:
        """Add a job, and return its number. Waits for room unless the store fails; without room the job is lost."""
        with self._changed:
            if not self._has_room(job):
                self._flushed = self._newest  # rows that wait for more rows would otherwise keep their room
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_room(job) or self.failure or self._is_over, patience_s)
            self._newest += 1
            if self._is_over or not self._has_room(job):
                why = "the recorder was closed" if self._is_over else f"more than {MOST_BYTES >> 20} MB waited"
                self._lose(job, why)
                self.suspect()
            else:
                if not self._jobs:
                    self._since = self._moved_at = time.monotonic()
                self._jobs.append((self._newest, job))
                self._size_bytes += job.size_bytes
                self._changed.notify_all()
            return self._newest

    def lose_groups(self, num_groups: int, num_rollouts: int, reason: str) -> None:
        """Count groups without ids that no job holds."""
        with self._changed:
            self._losses.add_groups((), num_rollouts, reason, num_unnamed=num_groups)
            self._warn()

    def lose_rows_of_step(self, step: int, reason: str) -> None:
        """Count a step whose ledger will lack some rows."""
        with self._changed:
            self._losses.add_step(step, reason)
            self._warn()

    def lose_numbers(self, step: int, reason: str) -> None:
        """Count metrics of a step that no job holds."""
        with self._changed:
            self._losses.add_numbers(step, reason)
            self._warn()

    def wait(self, number: int | None, timeout_s: float, *, is_patient: bool) -> bool:
        """Wait until all jobs up to one are done, for at most timeout_s seconds; return whether they are.

        number: of the job; None is the newest. is_patient: continue to wait while the store fails.
        """
        with self._changed:
            until = self._newest if number is None else number
            self._flushed = max(self._flushed, until)
            self._changed.notify_all()

            def is_over() -> bool:
                return not self._jobs or self._jobs[0][0] > until

            self._changed.wait_for(lambda: is_over() or (self.failure is not None and not is_patient), timeout_s)
            return is_over()

    def suspect(self) -> None:
        """Treat the store as failing if it finishes no job, so that no caller waits until it finishes one.

        Called after a wait timed out.
        """
        with self._changed:
            idle_s = time.monotonic() - self._moved_at
            if self._jobs and self.failure is None and idle_s >= _HANGS_S:
                self._fail(StoreError(f"nothing was stored for {idle_s:.1f} s"))

    def wait_until_open(self, timeout_s: float) -> bool:
        """Return whether the root is open, after at most timeout_s seconds; raises `mistake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._life.is_open or self.mistake or self.failure, timeout_s)
            if self.mistake is not None:
                raise self.mistake
            if not self._life.is_open and self.failure is None:
                self._fail(StoreError(f"the root did not open within {timeout_s:g} s"))
            return self._life.is_open

    def close(self, timeout_s: float) -> Lost:
        """Do the waiting jobs in at most timeout_s seconds, count the others as lost, and end the life."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        try:
            self._thread.join(timeout_s)
        finally:  # also if interrupted by Ctrl-C
            with self._changed:
                self._give_up()
        self._thread.join(_LAST_WORDS_S)
        return self.lost

    # --- With the lock -------------------------------------------------------------------------------------------

    def _has_room(self, job: Job) -> bool:
        return not self._jobs or self._size_bytes + job.size_bytes <= MOST_BYTES

    def _lose(self, job: Job, reason: str) -> None:
        why = f"{reason}, after {one_line(self.failure)}" if self.failure is not None else reason
        if isinstance(job, StoredRows):
            self._losses.add_groups(job.group_ids, job.table.num_rows, why)
        elif isinstance(job, LedgerStep):
            self._losses.add_step(job.step, why)
        elif isinstance(job, StepNumbers):
            self._losses.add_numbers(job.of.step, why)
        self._warn()

    def _give_up(self) -> None:
        """Count all jobs as lost, and accept no others."""
        self._is_over = True
        for _, job in self._jobs:
            self._lose(job, "the recorder ended before it was stored")
        self._jobs.clear()
        self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._warn(f"storing fails at the moment and is retried: {one_line(error)}")
        self._changed.notify_all()

    def _warn(self, text: str | None = None) -> None:
        """Log a warning, at most one a minute; without a text it says what was lost so far."""
        if time.monotonic() - self._warned >= _WARN_EVERY_S:
            self._warned = time.monotonic()
            logger.warning("%s: %s; the trainer continues", self._where, text or self._losses.so_far())

    # --- In the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pauses = _pauses()
        while (jobs := self._next()) is not None:
            if self._try(jobs):
                pauses = _pauses()
            elif not self._pause(next(pauses)):
                break
        with self._changed:
            self._give_up()
            lost = self._losses.so_far()
        try:
            self._life.end(lost)
        except Exception as error:
            logger.warning(
                "%s: the end of this recorder could not be recorded in its claim: %s", self._where, one_line(error)
            )

    def _pause(self, pause_s: float) -> bool:
        """Wait before a job is retried; return False if it is not retried. A closing recorder waits less."""
        with self._changed:
            if not self._is_closing:
                self._changed.wait_for(lambda: self._is_closing, pause_s)
            else:
                self._tries_left -= 1
                self._changed.wait_for(lambda: self._is_over, _FIRST_PAUSE_S)
            return not self._is_over and self._tries_left > 0

    def _next(self) -> Sequence[Job] | None:
        """Return the jobs to do next, none of them to open the root; None at the end."""
        with self._changed:
            if not self._life.is_open:
                return None if self._is_over or (self._is_closing and not self._jobs) else []
            while not self._is_over and not self._is_due():
                if self._is_closing:
                    return None
                self._changed.wait(max(0.0, self._since + FLUSH_AGE_S - time.monotonic()) if self._jobs else None)
            if self._is_over:
                return None
            self._in_hand = self._in_hand or self._head()
            return self._in_hand

    def _is_due(self) -> bool:
        if not self._jobs:
            return False
        number, first = self._jobs[0]
        if self._in_hand or self._is_closing or number <= self._flushed or not isinstance(first, StoredRows):
            return True
        num_groups = sum(len(job.group_ids) for _, job in self._jobs if isinstance(job, StoredRows))
        is_old = time.monotonic() - self._since >= FLUSH_AGE_S
        return is_old or num_groups >= FLUSH_GROUPS or self._size_bytes >= _FILE_BYTES

    def _head(self) -> list[Job]:
        """Return the first job; for rows, all jobs that share a file."""
        first = self._jobs[0][1]
        if not isinstance(first, StoredRows):
            return [first]
        size_bytes, found = 0, list[Job]()
        for _, job in self._jobs:
            size_bytes += job.size_bytes
            if not isinstance(job, StoredRows) or job.folder != first.folder or (found and size_bytes > _FILE_BYTES):
                break
            found.append(job)
        return found

    def _try(self, jobs: Sequence[Job]) -> bool:
        """Do jobs; return False if they must be done again."""
        try:
            self._do(jobs)
            reason = None
        except (StoreError, ReplacedRootError) as error:
            with self._changed:
                self._fail(error)
            return False
        except BaseException as error:  # an extension's panic is not an Exception; the trainer continues in any case
            reason = one_line(error) or type(error).__name__
            self._life.forget_rows()
            if not jobs:
                with self._changed:
                    self.mistake = error if isinstance(error, LudicError) else ConfigError(f"{self._where}: {reason}")
                    self._give_up()
        with self._changed:
            self.failure = None
            for job in jobs if not self._is_over else ():
                self._size_bytes -= job.size_bytes
                self._jobs.popleft()
                if reason is not None:
                    self._lose(job, reason)
                elif isinstance(job, LedgerStep) and job.lacks_rows:
                    self._losses.add_step(job.step, "rows that it names were lost")
            self._in_hand = []
            self._since = self._moved_at = time.monotonic()
            self._changed.notify_all()
        return True

    def _do(self, jobs: Sequence[Job]) -> None:
        first = jobs[0] if jobs else None
        if first is None:
            self._life.open()
        elif isinstance(first, LedgerStep):
            self._life.put_step(first)
        elif isinstance(first, StepNumbers):
            self._life.put_numbers(first)
        elif isinstance(first, Find):
            self._life.find(first)
        else:
            self._life.put_rows([job for job in jobs if isinstance(job, StoredRows)])
        with suppress(LudicError):  # the next job reports it
            self._life.say_lost(self.lost)


def _pauses() -> Iterator[float]:
    return back_off(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, growth=2)
