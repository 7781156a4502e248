"""Serve the pages of runs to browsers in one process: `ludic view --web`.

The address with its token is printed to stdout. Ctrl-C ends the server within a second, and the queries of open pages
with it. Raises ConfigError if the port is taken.
"""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from ludic.app.show.terminal.options import ViewOptions
from ludic.app.show.web.answering import Answering
from ludic.app.show.web.security import TOKEN, Guard
from ludic.app.show.web.site import Site
from ludic.base import LOCAL_HOSTS, host_names, listening, url_of
from ludic.errors import ConfigError
from ludic.root import Root


def serve(shown: Root | str, options: ViewOptions) -> None:
    """Serve a run, or the runs below a folder or URL, until SIGINT or SIGTERM. Raises ConfigError if the port is
    taken, or in a program with a running event loop, such as a notebook."""
    if _has_loop():
        raise ConfigError("a notebook can't serve pages; run `ludic view --web` in a terminal")
    with listening(options.host, options.port) as listener:
        if options.host not in LOCAL_HOSTS:
            print(
                f"ludic view: {options.host}:{options.port} is open to other machines, without encryption; whoever "
                "reads the token or the cookie on the way can read this run and label its rollouts",
                file=sys.stderr,
            )
        with Site(shown, author=options.author) as site:
            threading.Thread(target=site.warm_up, name="ludic-open", daemon=True).start()
            asyncio.run(_serve(site, listener, options))


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _serve(site: Site, listener: socket.socket, options: ViewOptions) -> None:
    stopping = asyncio.Event()
    names = host_names(options.host, options.host_names)
    guarded = Guard(Answering(site, stopping).app, names, announcer(site, options))
    config = uvicorn.Config(
        guarded,
        lifespan="off",
        access_log=False,  # addresses hold the token, and predicates of the user
        log_config=None,
        log_level=logging.WARNING,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    await _Server(config, stopping).serve(sockets=[listener])


def announcer(site: Site, options: ViewOptions) -> Callable[[str], None]:
    """Return a function that prints the address of the first page with a new token."""
    page = "" if options.rollout_id is None else site.link("", "rollout", {"id": options.rollout_id})
    where = f"{url_of(options.host, options.port)}{page or '/'}{'&' if page else '?'}{TOKEN}="
    beginnings = iter(["open "])

    def announce(token: str) -> None:
        beginning = next(beginnings, "that address has been used; for another browser open ")
        print(f"{beginning}{where}{token}", flush=True)

    return announce


class _Server(uvicorn.Server):
    """uvicorn's server, which tells running requests that it ends, and does not raise the signal again."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._stopping.set()
