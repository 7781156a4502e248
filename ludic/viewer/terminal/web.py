"""Serve the viewer to browsers, each with a process of its own, with textual-serve.

Answers only requests for this machine's own names unless another host was asked for, and sockets only to the page that
it served: without these checks any web page that the user visits could drive the viewer.
"""

import logging
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

from ludic.errors import ConfigError
from ludic.store import Root
from ludic.viewer.terminal.options import LOCAL_HOSTS, ViewOptions

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
    _LocalServer(command(root, options), options.host, options.port, title="ludic view").serve()


def command(root: Root, options: ViewOptions) -> str:
    """Return the command of a browser's process, quoted for the shell that textual-serve starts it with."""
    words = [sys.executable, "-m", "ludic", "view", root.url]
    words += [options.rollout_id] if options.rollout_id else []
    words += [f"--author={options.author}"] if options.author else []
    return shlex.join(words)


class _LocalServer(Server):
    """textual-serve's server, which refuses foreign hosts and foreign origins."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        app.middlewares.append(guard)
        return app

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        name = urlsplit(f"//{request.host}").hostname
        if self.host in LOCAL_HOSTS and name not in LOCAL_HOSTS:
            raise web.HTTPForbidden(text="the viewer answers requests for this machine only")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text="the viewer answers its own page only")
        self.public_url = f"{request.scheme}://{request.host}"  # the page names it, also behind a forwarded port
        response = await handler(request)
        if not response.prepared:
            response.headers["Content-Security-Policy"] = _POLICY.format(socket=f"ws://{request.host}")
        return response


def _check_port(host: str, port: int) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(f"can't serve at {host}:{port}: {error.strerror or error}; give another --port") from error
