"""Read the answer of an HTTP server within a limit of time and of size, whatever the server is.

A time-out of httpx is one of silence: a server that sends a byte a minute is waited for without end, and one that sends
more than fits into memory ends the process. Here the limit of time is that of the whole request.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from ludic.errors import LudicError

MOST_BYTES = 8 << 20
"""Largest answer that is read if no larger one is expected."""


class AnswerTooLongError(LudicError, ValueError):
    """A server answered with more bytes than were wanted."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    data: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The answer as UTF-8; other bytes are replaced."""
        return self.data.decode(errors="replace")


async def ask(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    *,
    timeout_s: float,
    connect_s: float | None = None,
    most_bytes: int = MOST_BYTES,
    json: Any = None,
    params: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """Send a request, and return the whole answer, also one that says that something is wrong.

    timeout_s: of all of it, above 0. connect_s: of the connection; None is timeout_s. most_bytes: largest answer.
    Raises httpx2.TransportError if no whole answer comes (TimeoutException: none in time), AnswerTooLongError for a
    larger one.
    """
    timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, connect_s or timeout_s))
    # Compressed, a small answer could be any size in memory.
    headers = {**(headers or {}), "Accept-Encoding": "identity"}
    data = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(method, url, json=json, params=params, timeout=timeout, headers=headers) as response,
        ):
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > most_bytes:
                    raise AnswerTooLongError(f"the server answered more than {most_bytes:,} bytes")
    except TimeoutError as error:
        raise httpx2.ReadTimeout(f"no whole answer within {timeout_s:g} s") from error
    return HttpAnswer(response.status_code, bytes(data))
