"""`ludic watch ROOT`: show the live state of a run, from any machine that can read its files.

Reads metrics, lease, LATEST and the names of checkpoints; writes nothing. While the filesystem fails, the last frame
stays, with the reason below it. Raises MissingRootError if there is no run, or it is deleted.
"""

import time
from contextlib import suppress

from ludic.cli.flags.watch import Settings
from ludic.viewer.dashboard import draw
from ludic.viewer.live import LiveView
from ludic.viewer.output import stdout_console
from ludic.viewer.status import Watcher

_TICK_S = 0.1


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
