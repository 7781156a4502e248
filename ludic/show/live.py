"""A live view of a run: a panel in a terminal, else one log line per step."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ludic.errors import SchemaError, StoreError
from ludic.results import printable
from ludic.show.dashboard import draw
from ludic.show.status import Row, RunStatus, Watcher, describe_step
from ludic.store.records import CheckpointId
from ludic.troubles import TroubleLog

logger = logging.getLogger("ludic.run")

_NEWEST_CALLS = 16
"""Number of engine calls over which a step's share of incomplete completions is computed."""

_TICK_S = 0.1
_INTERVAL_S = 0.5

Update = Callable[[], None]
"""Refreshes a view if the last look is old enough; may be called often. Raises MissingRootError."""


def open_view(watcher: Watcher) -> AbstractContextManager[Update]:
    """Follow a run while the block lasts: in a panel if stderr is a terminal, else in the log."""
    console = Console(stderr=True)
    return live_panel(watcher, console) if console.is_terminal else step_log(watcher)


@contextmanager
def live_panel(watcher: Watcher, console: Console, interval_s: float = _INTERVAL_S) -> Iterator[Update]:
    """Show a panel that follows a run; StoreError and SchemaError are shown below the last frame."""
    last: RunStatus | None = None

    def look() -> None:
        nonlocal last
        try:
            last = watcher.look()
            live.update(draw(last, console.width))
        except (StoreError, SchemaError) as error:
            shown = draw(last, console.width) if last else Text("nothing seen yet")
            live.update(Group(shown, Text(f"looking again: {printable(str(error))}", style="bold red")))

    with Live(console=console, refresh_per_second=4) as live:
        look()
        yield _at_most_every(interval_s, look)
        look()


@contextmanager
def step_log(watcher: Watcher, interval_s: float = _INTERVAL_S) -> Iterator[Update]:
    """Log one line per new gradient step, each trouble of the run when it begins, StoreError and SchemaError."""
    known = set(map(_checkpoint_id, watcher.look().steps))
    troubles = TroubleLog(logger)

    def look() -> None:
        try:
            status = watcher.look()
        except (StoreError, SchemaError) as error:
            logger.warning("looking again: %s", error)
            return
        num_steps = status.trainer.num_steps if status.trainer else None
        of_all = "" if num_steps is None else f" of {num_steps}"
        for row in status.steps:
            if _checkpoint_id(row) not in known:
                known.add(_checkpoint_id(row))
                logger.info("step %d%s  %s%s", row["step"], of_all, describe_step(row), _incomplete(status))
        troubles.tell(status.troubles())

    yield _at_most_every(interval_s, look)
    look()


def watch(watcher: Watcher, console: Console, interval_s: float) -> None:
    """Print the state of a run until Ctrl-C: a live panel in a terminal, else one panel per look.

    Raises MissingRootError if the run is deleted.
    """
    with suppress(KeyboardInterrupt):
        if console.is_terminal:
            with live_panel(watcher, console, interval_s) as update:
                while True:
                    update()
                    time.sleep(_TICK_S)
        while True:  # stdout is a file or a pipe
            console.print(draw(watcher.look(), console.width))
            time.sleep(interval_s)


def _at_most_every(interval_s: float, look: Callable[[], None]) -> Update:
    """Return a function that calls `look` unless its last call ended less than `interval_s` ago."""
    looked = time.monotonic() - interval_s

    def update() -> None:
        nonlocal looked
        if time.monotonic() - looked >= interval_s:
            look()
            looked = time.monotonic()

    return update


def _checkpoint_id(row: Row) -> CheckpointId:
    return row["attempt_id"], row["step"]


def _incomplete(status: RunStatus) -> str:
    """Return the share of incomplete completions among the newest rollouts, as text; "" if unknown."""
    calls = [row for row in status.newest_calls[-_NEWEST_CALLS:] if row["num_incomplete_completions"] is not None]
    num_rollouts = sum(row["num_rollouts"] for row in calls)
    if not num_rollouts:
        return ""
    return f"  incomplete {sum(row['num_incomplete_completions'] for row in calls) / num_rollouts:.1%}"
