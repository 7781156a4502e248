"""Serve the viewer to browsers with textual-serve, in one process per browser.

Answers only requests with the user's own names of this machine, and sockets only from the page that it served. Without
these checks any web page that the user visits could control the viewer, since the page's own host name may point to
this machine. Raises ConfigError if the port is taken.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

from ludic.app.show.terminal.options import LOCAL_HOSTS, ViewOptions
from ludic.base import shell_command
from ludic.errors import ConfigError
from ludic.root import Root

_CLOSE_WITHIN_S = 1.0
"""Seconds for open pages to close; a browser may never answer."""
_EVERY_ADDRESS = {"", "0.0.0.0", "::"}
"""Addresses to listen at that do not name a machine."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Scripts and styles of the page are its own, and partly in the page. Nothing comes from another server.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; connect-src 'self' {socket}; "
    "frame-ancestors 'none'"
)


def serve(root: Root, options: ViewOptions) -> None:
    """Serve until Ctrl-C. Raises ConfigError if the port is taken."""
    if root.url.startswith("memory://"):
        raise ConfigError(f"{root.url} is in the memory of this process, and each browser gets a process of its own")
    _check_port(options.host, options.port)
    if options.host not in LOCAL_HOSTS:
        print(
            f"ludic view: anyone who reaches {options.host}:{options.port} can read this run and label its rollouts",
            file=sys.stderr,
        )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    _Server(command(root, options), options).run()


def command(root: Root, options: ViewOptions) -> str:
    """Return the command of a browser's process, quoted for the shell that textual-serve starts it with."""
    words = ["-m", "ludic", "view", root.url]
    words += [options.rollout_id] if options.rollout_id else []
    words += [f"--author={options.author}"] if options.author else []
    return shell_command(words)


class _Server(Server):
    """textual-serve's server, which refuses foreign hosts and foreign origins, and ends at once."""

    def __init__(self, command: str, options: ViewOptions) -> None:
        super().__init__(command, options.host, options.port, title="ludic view")
        self._names = _names(options)
        self._pages: set[asyncio.Task[Any]] = set()
        """Tasks of the open pages."""

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        self.initialize_logging()
        web.run_app(self._make_app(), host=self.host, port=self.port, print=None, shutdown_timeout=_CLOSE_WITHIN_S)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        page = asyncio.current_task()
        assert page is not None
        self._pages.add(page)
        try:
            return await super().handle_websocket(request)
        finally:
            self._pages.discard(page)

    async def on_shutdown(self, app: web.Application) -> None:
        for page in self._pages:
            page.cancel()  # ends the page's process, and then waits for the browser
        if self._pages:
            await asyncio.wait(self._pages, timeout=_CLOSE_WITHIN_S)

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        app.middlewares.append(guard)
        return app

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        name = _host_of(f"//{request.host}")
        if name is None or name not in {*self._names, _own_address(request)}:
            raise web.HTTPForbidden(
                text="the viewer answers requests for this machine only; --host-names adds a name of it"
            )
        origin = request.headers.get("Origin")
        if origin is not None and (_host_of(origin) != name or urlsplit(origin).netloc != request.host):
            raise web.HTTPForbidden(text="the viewer answers its own page only")
        self.public_url = f"{request.scheme}://{request.host}"  # the page names it, also behind a forwarded port
        response = await handler(request)
        if not response.prepared:
            response.headers["Content-Security-Policy"] = _POLICY.format(socket=f"ws://{request.host}")
        return response


def _names(options: ViewOptions) -> set[str]:
    """Return the names by which requests may call this machine."""
    names = {*LOCAL_HOSTS, options.host, *options.host_names}
    if options.host not in LOCAL_HOSTS:
        names |= {socket.gethostname(), socket.getfqdn()}
    return {name.lower() for name in names - _EVERY_ADDRESS}


def _own_address(request: web.Request) -> str | None:
    """Return the address of this machine that the request reached; a page's host name can't equal it."""
    sockname = request.get_extra_info("sockname")
    return None if sockname is None else str(sockname[0])


def _host_of(url: str) -> str | None:
    """Return the host of a URL in lower case, without its port; None if there is none, or it can't be read."""
    try:
        return urlsplit(url).hostname
    except ValueError:  # "[::1"
        return None


def _check_port(host: str, port: int) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(f"can't serve at {host}:{port}: {error.strerror or error}; give another --port") from error
