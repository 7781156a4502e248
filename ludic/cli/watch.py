"""`ludic watch ROOT`: show the live state of a run, from any machine that can read its files.

Reads metrics, lease, LATEST and the names of checkpoints; writes nothing. While the filesystem fails, the last frame
stays, with the reason below it. Raises MissingRootError if there is no run, or it is deleted.
"""

import time
from contextlib import suppress
from dataclasses import dataclass

from ludic.bounds import check_numbers
from ludic.cli.glance import Watcher
from ludic.cli.live import LiveView
from ludic.cli.output import stdout_console
from ludic.cli.panel import draw
from ludic.cli.settings import RootUrl

_TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    interval_s: float = 2.0
    """Seconds between two looks at the files."""
    once: bool = False
    """Print one frame and exit."""

    def __post_init__(self) -> None:
        check_numbers(self)


def main(settings: Settings) -> None:
    watcher, console = Watcher(settings.root), stdout_console()
    if settings.once:
        console.print(draw(watcher.look(), console.width))
        return
    with suppress(KeyboardInterrupt):  # Ctrl-C ends the command
        if console.is_terminal:
            with LiveView(watcher, console, interval_s=settings.interval_s) as view:
                while True:
                    view.update()
                    time.sleep(_TICK_S)
        while True:  # stdout is a file or a pipe
            console.print(draw(watcher.look(), console.width))
            time.sleep(settings.interval_s)
