"""Start the viewer in this terminal, in browsers, or for one picture. Raises ConfigError, UnknownIdError."""

import asyncio
import re
import sys
from dataclasses import replace
from os import fspath
from typing import TYPE_CHECKING

from ludic.app.show.lookup import look_up
from ludic.app.show.terminal.options import ViewOptions
from ludic.base import local_path, require
from ludic.errors import ConfigError
from ludic.root import Root

if TYPE_CHECKING:
    from ludic.app.show.terminal.app import ViewApp

_PICTURE_SIZE = (124, 36)
_FONT_FACES = re.compile(r"@font-face\s*\{[^}]*\}")
_TITLE = "ludic view"


def view_run(root: Root, options: ViewOptions) -> None:
    """Open the viewer of a run."""
    require("uvicorn" if options.web else "textual", "view", "the viewer")
    if options.rollout_id is not None:
        found = look_up(root, options.rollout_id, "rollout").record.rollout_id
        options = replace(options, rollout_id=found)
    if options.web:
        from ludic.app.show.web.server import serve

        serve(root, options)
        return
    from ludic.app.show.terminal.app import ViewApp

    app = ViewApp(root, rollout_id=options.rollout_id, author=options.author)
    if options.picture is not None:
        path = local_path(fspath(options.picture), "picture")
        path.write_text(asyncio.run(draw(app)), encoding="utf-8")
        return
    if not has_terminal():
        said = f"`ludic view {root.url} ID` and `ludic sql` print to files and pipes"
        raise ConfigError(f"the viewer needs a terminal; {said}")
    with app.showing_warnings():
        app.run()


def view_runs(folder: str, options: ViewOptions) -> None:
    """List the runs below a folder; the viewer of a chosen run leads back to the list."""
    for name, is_given in {"ID": options.rollout_id, "picture": options.picture}.items():
        if is_given:
            raise ConfigError(
                f"{folder} is not a run, and {name} is of one; `ludic runs {folder}` lists the runs below it"
            )
    require("uvicorn" if options.web else "textual", "view", "the viewer")
    if options.web:
        from ludic.app.show.web.server import serve

        serve(folder, options)
        return
    if not has_terminal():
        raise ConfigError(f"the viewer needs a terminal; `ludic runs {folder}` prints to files and pipes")
    from ludic.app.show.terminal.run_list import RunListApp

    chosen: str | None = None
    while (chosen := RunListApp(folder, chosen).run()) is not None:
        view_run(Root.open(chosen), options)


def has_terminal() -> bool:
    """Return whether the viewer can open."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


async def draw(app: "ViewApp", *keys: str) -> str:
    """Return a picture, as SVG, of the screen after some keys; it names no font of another server."""
    async with app.run_test(size=_PICTURE_SIZE) as pilot:
        await app.workers.wait_for_complete()
        for key in keys:
            await pilot.press(key)
            await app.workers.wait_for_complete()
        await pilot.pause()
        return without_fonts(app.export_screenshot(title=_TITLE))


def without_fonts(svg: str) -> str:
    """Return a picture of rich without the fonts that it takes from another server."""
    return _FONT_FACES.sub("", svg)
