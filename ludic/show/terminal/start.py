"""What the viewer shows and where, and its start: in this terminal, in browsers, or for one picture.

Imports neither textual nor what reads a root until it starts, so that `ludic view --help` answers at once.
"""

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ludic.errors import ConfigError
from ludic.settings import Port, Shown, check

if TYPE_CHECKING:
    from ludic.show.terminal.app import ViewApp
    from ludic.store import Root

LOCAL_HOST = "127.0.0.1"
LOCAL_HOSTS = (LOCAL_HOST, "localhost", "::1")
PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """Options of `ludic view`."""

    rollout_id: Annotated[str | None, Shown("[ID]", by_position=True)] = None
    """Rollout to begin with, or a beginning or an end of its id; None begins with the versions."""
    author: str | None = None
    """Author of labels given in the viewer; None is the user of this machine."""
    picture: Path | None = None
    """SVG file to write a picture of the first screen to, instead of opening the viewer."""
    web: bool = False
    """Serve the viewer to browsers instead of opening it in this terminal."""
    host: str = LOCAL_HOST
    """Address to serve at; any but the default lets other machines read the run and write labels."""
    host_names: tuple[str, ...] = ()
    """More names by which browsers call this machine, such as a proxy's; requests for other names are refused."""
    port: Port = PORT
    """Port to serve at."""

    def __post_init__(self) -> None:
        check(self)
        if self.web and self.picture is not None:
            raise ConfigError("web and picture contradict each other; give one of them")


_PICTURE_SIZE = (124, 36)
_FONT_FACES = re.compile(r"@font-face\s*\{[^}]*\}")
_IN_BROWSER = "TEXTUAL_DRIVER"
"""Environment variable that textual-serve sets for the process of a page."""
_TITLE = "ludic view"


def view_run(root: "Root", options: ViewOptions) -> None:
    """Open the viewer of a run. Raises ConfigError, UnknownIdError."""
    import asyncio

    from ludic.children import end_with_parent
    from ludic.installed import require
    from ludic.paths import local_path
    from ludic.show.found import look_up

    require("textual", "view", "the viewer")
    if options.rollout_id is not None:
        found = look_up(root, options.rollout_id, "rollout").record.rollout_id
        options = replace(options, rollout_id=found)
    if options.web:
        require("textual_serve", "view", "the viewer in a browser")
        from ludic.show.terminal.web import serve

        serve(root, options)
        return
    if _IN_BROWSER in os.environ:
        end_with_parent()
    from ludic.show.terminal.app import ViewApp

    app = ViewApp(root, rollout_id=options.rollout_id, author=options.author)
    if options.picture is not None:
        path = local_path(os.fspath(options.picture), "picture")
        path.write_text(asyncio.run(draw(app)), encoding="utf-8")
        return
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)) and _IN_BROWSER not in os.environ:
        raise ConfigError("the viewer needs a terminal; `ludic show` and `ludic sql` print to files and pipes")
    with app.showing_warnings():
        app.run()


async def draw(app: "ViewApp", *keys: str) -> str:
    """Return a picture, as SVG, of the screen after some keys; it names no font of another server."""
    async with app.run_test(size=_PICTURE_SIZE) as pilot:
        await app.workers.wait_for_complete()
        for key in keys:
            await pilot.press(key)
            await app.workers.wait_for_complete()
        await pilot.pause()
        return _FONT_FACES.sub("", app.export_screenshot(title=_TITLE))
