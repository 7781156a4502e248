"""Name this machine, and open a socket that accepts connections to it: for the servers that ludic runs.

A server on a local address answers requests for the machine's own names alone: a web page whose name leads to this
machine (DNS rebinding) could read the answers otherwise. Raises ConfigError if a port can't be used.
"""

import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from ludic.errors import ConfigError

LOCAL_HOST = "127.0.0.1"
LOCAL_HOSTS = (LOCAL_HOST, "localhost", "::1")
EVERY_ADDRESS = {"", "0.0.0.0", "::"}
"""Addresses to listen at that do not name a machine."""


def host_names(host: str, more: Collection[str] = ()) -> set[str]:
    """Return the names by which requests may call this machine. host: the address that the server listens at."""
    names = {*LOCAL_HOSTS, host, *more}
    if host not in LOCAL_HOSTS:
        names |= {socket.gethostname(), socket.getfqdn()}
    return {name.lower() for name in names - EVERY_ADDRESS}


def host_of(url: str) -> str | None:
    """Return the host of a URL in lower case, without its port; None if there is none, or it can't be read."""
    try:
        return urlsplit(url).hostname
    except ValueError:  # "[::1"
        return None


def url_of(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server. host: the address that the server listens at."""
    host = LOCAL_HOST if host in EVERY_ADDRESS else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def listening(host: str, port: int, backlog: int = 128) -> Iterator[socket.socket]:
    """Yield a socket that accepts connections. port: 0 takes a free one. Raises ConfigError if it can't be opened."""
    listener: socket.socket | None = None
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(backlog)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"can't serve at {host}:{port}: {error.strerror or error}; give another --port") from error
    with listener:
        yield listener
