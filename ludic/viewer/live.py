"""A live view of a run: a panel in a terminal, else one log line per step."""

import logging
import time
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ludic.errors import SchemaError, StoreError
from ludic.store.attempts import CheckpointId
from ludic.store.troubles import TroubleLog
from ludic.viewer.dashboard import draw
from ludic.viewer.output import printable
from ludic.viewer.status import Row, RunStatus, Watcher, describe_step

logger = logging.getLogger("ludic.run")

_NEWEST_CALLS = 16
"""Number of engine calls over which a step's share of incomplete completions is computed."""

_TICK_S = 0.1


class View(AbstractContextManager["View"], Protocol):
    """Follows a run while the block lasts."""

    def update(self) -> None:
        """Refresh the view if the last look is old enough; may be called often. Raises MissingRootError."""
        ...


def open_view(watcher: Watcher) -> View:
    """Return a LiveView if stderr is a terminal, else a StepLog."""
    console = Console(stderr=True)
    return LiveView(watcher, console) if console.is_terminal else StepLog(watcher)


class LiveView:
    """A panel that follows a run while the block lasts; `update` may be called often."""

    def __init__(self, watcher: Watcher, console: Console, *, interval_s: float = 0.5) -> None:
        self._watcher, self._interval_s = watcher, interval_s
        self._live = Live(console=console, refresh_per_second=4)
        self._looked = 0.0
        self._glance: RunStatus | None = None

    def __enter__(self) -> "LiveView":
        self._live.start()
        self.update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._look()
        finally:
            self._live.stop()

    def update(self) -> None:
        """Redraw if the last look is old enough. Raises MissingRootError; shows StoreError and SchemaError instead."""
        if time.monotonic() - self._looked >= self._interval_s:
            self._look()

    def _look(self) -> None:
        try:
            self._glance = self._watcher.look()
            self._live.update(draw(self._glance, self._live.console.width))
        except (StoreError, SchemaError) as error:
            shown = draw(self._glance, self._live.console.width) if self._glance else Text("nothing seen yet")
            self._live.update(Group(shown, Text(f"looking again: {printable(str(error))}", style="bold red")))
        self._looked = time.monotonic()


def watch(watcher: Watcher, console: Console, interval_s: float) -> None:
    """Print the state of a run until Ctrl-C: a live panel in a terminal, else one panel per look.

    Raises MissingRootError if the run is deleted.
    """
    with suppress(KeyboardInterrupt):
        if console.is_terminal:
            with LiveView(watcher, console, interval_s=interval_s) as view:
                while True:
                    view.update()
                    time.sleep(_TICK_S)
        while True:  # stdout is a file or a pipe
            console.print(draw(watcher.look(), console.width))
            time.sleep(interval_s)


class StepLog:
    """Logs one line per gradient step, and each trouble of the run when it begins."""

    def __init__(self, watcher: Watcher, *, interval_s: float = 0.5) -> None:
        self._watcher, self._interval_s = watcher, interval_s
        self._looked = 0.0
        self._known: set[CheckpointId] = set()
        self._troubles = TroubleLog(logger)

    def __enter__(self) -> "StepLog":
        self._known = {_checkpoint_id(row) for row in self._watcher.look().steps}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._look()

    def update(self) -> None:
        """Log new steps if the last look is old enough. Raises MissingRootError; logs StoreError and SchemaError."""
        if time.monotonic() - self._looked >= self._interval_s:
            self._look()

    def _look(self) -> None:
        try:
            status = self._watcher.look()
        except (StoreError, SchemaError) as error:
            logger.warning("looking again: %s", error)
        else:
            self._tell(status)
        self._looked = time.monotonic()

    def _tell(self, status: RunStatus) -> None:
        num_steps = status.trainer.num_steps if status.trainer else None
        of_all = "" if num_steps is None else f" of {num_steps}"
        for row in status.steps:
            if _checkpoint_id(row) not in self._known:
                self._known.add(_checkpoint_id(row))
                logger.info("step %d%s  %s%s", row["step"], of_all, describe_step(row), _incomplete(status))
        self._troubles.tell(status.troubles())


def _checkpoint_id(row: Row) -> CheckpointId:
    return row["attempt_id"], row["step"]


def _incomplete(status: RunStatus) -> str:
    """Return the share of incomplete completions among the newest rollouts, as text; "" if unknown."""
    calls = [row for row in status.newest_calls[-_NEWEST_CALLS:] if row["num_incomplete_completions"] is not None]
    num_rollouts = sum(row["num_rollouts"] for row in calls)
    if not num_rollouts:
        return ""
    return f"  incomplete {sum(row['num_incomplete_completions'] for row in calls) / num_rollouts:.1%}"
