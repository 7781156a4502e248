"""Ports for servers of benchmarks and tests."""

import random
import socket


def free_port() -> int:
    """Give a port that nobody listens on, of those that no system hands out for outgoing connections by itself.

    One that the system would choose ("port 0") may be taken by any other connection before its server binds it.
    """
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := random.SystemRandom().randrange(15_000, 32_000)))
            except OSError:
                continue
            return port
