"""A real HTTP proxy in front of an S3 server, which refuses, delays, resets or loses answers as a test says."""

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Refuse:
    """Answer with an S3 error."""

    status: int
    code: str
    message: str = "As told."


@dataclass(frozen=True)
class Reply:
    """Answer with this."""

    status: int
    body: str = ""


@dataclass(frozen=True)
class Reset:
    """Reset the connection, before or after the server has done what was asked."""

    after: bool = False


@dataclass(frozen=True)
class Delay:
    """Answer late."""

    seconds: float


Reaction = Refuse | Reply | Reset | Delay | None
"""None: pass on what the server answers."""
React = Callable[[str, str], Reaction]
"""From method and path."""

SLOW_DOWN = Refuse(503, "SlowDown", "Please reduce your request rate.")


class S3Proxy:
    """Listens on a free port of this machine."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.react: React = lambda method, path: None
        self.requests: list[str] = []
        """Method and path of each, in order."""
        self.headers: list[dict[str, str]] = []
        """Of each request; names in lower case."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def once(self, *reactions: Reaction) -> None:
        """React to the next requests like this, and pass on all later ones."""
        left = list(reactions)
        self.react = lambda method, path: left.pop(0) if left else None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(proxy: S3Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def reply(self) -> None:
            body = self._body()
            proxy.requests.append(f"{self.command} {self.path}")
            proxy.headers.append({name.lower(): value for name, value in self.headers.items()})
            match proxy.react(self.command, self.path):
                case Refuse(status, code, message):
                    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
                    region = {"x-amz-bucket-region": "eu-west-1"} if status == 301 else {}
                    return self._answer(status, region, text.encode())
                case Reply(status, text):
                    return self._answer(status, {"ETag": '"0"'}, text.encode())
                case Reset(after=False):
                    return self._reset()
                case Reset(after=True):
                    self._forward(body)
                    return self._reset()
                case Delay(seconds):
                    time.sleep(seconds)
            return self._answer(*self._forward(body))

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = reply  # noqa: N815 (the names that http.server calls)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = HTTPConnection(urlsplit(proxy.upstream).netloc)
            headers = {name: value for name, value in self.headers.items() if name != "Transfer-Encoding"}
            connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            response = connection.getresponse()
            content = response.read()
            connection.close()
            hops = {"connection", "content-length", "date", "server", "transfer-encoding"}
            kept = {name: value for name, value in response.getheaders() if name.lower() not in hops}
            if self.command == "HEAD":
                kept["Content-Length"] = response.headers["Content-Length"]
            return response.status, kept, content

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _reset(self) -> None:
            # Closing with a linger of 0 s sends RST.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

        def log_message(self, *_) -> None:
            """Quiet."""

    return Handler
