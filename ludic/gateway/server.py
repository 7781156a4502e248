"""Serve a gateway over HTTP with uvicorn: in process for a worker, or as a process of its own.

Connections have limits that uvicorn lacks: of the bytes of a request's headers, of the time until headers and body are
there, and of the time that a client may read nothing. There is no access log, and no log has a key.
Raises ConfigError if the port can't be used.
"""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ludic.base import LOCAL_HOST, LOCAL_HOSTS, host_names, listening, url_of
from ludic.gateway.app import make_app
from ludic.gateway.config import HttpSettings
from ludic.gateway.gateway import Gateway

_BACKLOG = 4_096
"""Connections that wait to be accepted; the kernel may allow fewer."""
_MOST_FILES = 65_536
_SEND_BUFFER = 128 << 10
"""Bytes of an answer that the kernel holds for a client, doubled by Linux; its own limit of 4 MB would be 20 GB for
5,000 clients that read slowly."""
_LAST_BYTES_S = 10.0
"""Seconds until a connection is cut that was closed and whose client does not read its last bytes."""
_FRAMES = 1 << 20
"""Bytes of a body's chunks and trailers beside its content."""
_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 39\r\nconnection: close\r\n\r\nthe headers of the request are too long"
)


@asynccontextmanager
async def running(
    gateway: Gateway,
    http: HttpSettings | None = None,
    *,
    own_key_digest: str | None = None,
    listener: socket.socket | None = None,
) -> AsyncIterator[str]:
    """Serve a gateway in this event loop, and yield its address, without /v1. At the end, answers are sent.

    listener: socket that accepts connections; None opens one for this machine alone, at a free port. It does not end
    the gateway: call its `drain` before.
    """
    http = http or HttpSettings()
    with contextlib.ExitStack() as stack:
        listener = listener or stack.enter_context(listening(LOCAL_HOST, 0, _BACKLOG))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # of each connection
        host, port = listener.getsockname()[:2]
        allow_many_files()
        # On an address that other machines reach, only the key protects: names of clusters and proxies are many.
        names = host_names(host, http.host_names) if host in LOCAL_HOSTS else None
        app = make_app(gateway, http, own_key_digest=own_key_digest, names=names)
        server = _Server(app, http, gateway.settings.max_body_bytes)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not task.done():
                await asyncio.sleep(0.001)
            # What was imported stays: a collection would look at a million objects, which takes all calls 0.2 s.
            gc.freeze()
            yield url_of(host, port)
        finally:
            gc.unfreeze()
            server.should_exit = True
            await task


def new_loop() -> asyncio.Runner:
    """Return a runner with the quickest event loop that is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:  # on Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def allow_many_files() -> None:
    """Raise the limit of open files, so that there can be thousands of connections."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server(uvicorn.Server):
    """uvicorn's server without its handlers of signals."""

    def __init__(self, app: Any, http: HttpSettings, max_body_bytes: int) -> None:
        # A subclass of its own, since uvicorn makes the protocols itself.
        most = 2 * max_body_bytes + _FRAMES
        protocol = type("GatewayProtocol", (_Protocol,), {"http": http, "most_body_bytes": most})
        config = uvicorn.Config(
            app,
            http=protocol,
            loop="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level=logging.ERROR,  # warnings are of odd requests: anybody could fill the log
            server_header=False,
            proxy_headers=False,
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=max(1, round(http.idle_s)),
            timeout_graceful_shutdown=max(1, round(http.send_within_s)),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """A connection with limits of headers and time."""

    http: HttpSettings
    most_body_bytes: int
    """Bytes behind the headers of a request at which the connection is cut, also while they are dropped."""
    _timer: asyncio.TimerHandle | None = None
    """Cuts the connection unless the headers of a request, and its body, come in time."""
    _reading: asyncio.TimerHandle | None = None
    """Cuts it unless the client reads."""
    _is_in_headers = True
    _header_bytes = 0
    _body_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait(self.http.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._reading, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers:
            if self._header_bytes > self.http.max_header_bytes:
                self.transport.write(_TOO_LONG)
                self.transport.close()
                return
            if self._header_bytes == 0:
                self._wait(self.http.receive_within_s)
            self._header_bytes += len(data)
        else:
            self._body_bytes += len(data)
            if self._body_bytes > self.most_body_bytes:
                self.transport.abort()
                return
        super().data_received(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_headers, self._header_bytes, self._body_bytes = False, 0, 0
        # The application limits the time of the body. After a refusal, what is left of it is read and dropped.
        self._wait(2 * self.http.receive_within_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_headers = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # its last bytes may not be read
            self.loop.call_later(self.http.send_within_s, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self.http.send_within_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(_LAST_BYTES_S, self.transport.abort)

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.transport.abort)
