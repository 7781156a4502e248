"""A live view of a run in the terminal: looks at it, and draws what it saw, again and again."""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ludic.cli.glance import Glance, Watcher
from ludic.cli.output import printable
from ludic.cli.panel import draw
from ludic.errors import SchemaError, StoreError


class LiveView:
    """A panel that follows a run while the block lasts; `update` may be called often."""

    def __init__(self, watcher: Watcher, console: Console, *, interval_s: float = 0.5) -> None:
        self._watcher, self._interval_s = watcher, interval_s
        self._live = Live(console=console, refresh_per_second=4)
        self._looked = 0.0
        self._glance: Glance | None = None

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
        if not self._live.console.is_terminal:
            self._live.console.print()  # rich leaves the last line open

    def update(self) -> None:
        """Look, if the last look is old enough. Raises MissingRootError; any other failure is shown."""
        if time.monotonic() - self._looked >= self._interval_s:
            self._look()

    def _look(self) -> None:
        try:
            self._glance = self._watcher.look()
            self._live.update(draw(self._glance))
        except (StoreError, SchemaError) as error:
            shown = draw(self._glance) if self._glance else Text("nothing seen yet")
            self._live.update(Group(shown, Text(f"looking again: {printable(str(error))}", style="bold red")))
        self._looked = time.monotonic()
