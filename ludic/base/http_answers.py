"""Send an HTTP request and read the whole answer within limits of time and size.

A timeout of httpx limits only the time between bytes: a server that sends a byte a minute would be waited for without
end, and one that sends more than fits into memory would end the process. Here the time limit is that of the whole
request.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from ludic.errors import LudicError

MOST_BYTES = 8 << 20
"""Default maximum bytes of an answer."""


class AnswerTooLongError(LudicError, ValueError):
    """A server answered with more bytes than were wanted."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case."""

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
    """Send a request, and return the whole answer, also an error status.

    timeout_s: of the whole request, above 0. connect_s: of the connection; None is timeout_s. most_bytes: maximum size
    of the answer. Raises httpx2.TransportError if no whole answer comes (TimeoutException: none in time),
    AnswerTooLongError for a larger one.
    """
    timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, connect_s or timeout_s))
    # A small compressed answer could have any size in memory.
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
    return HttpAnswer(response.status_code, bytes(data), dict(response.headers))
