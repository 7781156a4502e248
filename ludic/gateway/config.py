"""Settings of a gateway, of its HTTP server, and of its calls to another server.

Imports nothing slow, so that `--help` answers at once.
"""

from dataclasses import dataclass
from typing import Annotated

from ludic.settings import InFlight, PositiveCount, Range, SecondsOfADay
from ludic.settings.table import check

KEY_VARIABLE = "LUDIC_UPSTREAM_KEY"
"""Environment variable with the key of an upstream server, unless upstream_key names another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of a gateway."""

    lenient: bool = False
    """Treat response_format and a required tool choice as auto, and record it, instead of refusing them."""
    keep_thinking: bool = False
    """Keep the thinking of earlier answers in prompts, where the chat template would drop it."""
    max_in_flight: InFlight = 1024
    """Maximum calls at a time, and as many counts of tokens; others are answered 429 with Retry-After."""
    max_episodes: PositiveCount = 10_000
    """Maximum open episodes; others are answered 429."""
    episode_timeout_s: SecondsOfADay = 86_400.0
    """Seconds after which an open episode is sealed as expired, and its key no longer works."""
    max_body_bytes: PositiveCount = 32 << 20
    """Maximum bytes of a request's body."""
    drain_timeout_s: SecondsOfADay = 60.0
    """Maximum seconds that a stopping gateway, or the end of an expired episode, waits for calls that are sampled."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Limits of the gateway's HTTP server."""

    host_names: tuple[str, ...] = ()
    """More names by which clients call this machine; on a local address, requests for other names are refused."""
    open_stream_after_s: SecondsOfADay = 60.0
    """Seconds after which a stream opens although the answer is not complete. Before, a failed call is an HTTP status,
    and clients try again."""
    keep_alive_s: SecondsOfADay = 15.0
    """Seconds between the events that keep an open stream alive until the answer is complete."""
    receive_within_s: SecondsOfADay = 60.0
    """Maximum seconds until a client has sent its headers, and as many until it has sent the body."""
    send_within_s: SecondsOfADay = 120.0
    """Maximum seconds that a client may read nothing of an answer; then its connection is cut. The answer is stored."""
    idle_s: SecondsOfADay = 600.0
    """Seconds without a request after which a connection is closed."""
    max_held_mb: Annotated[int, Range(1, 10**7)] = 2_048
    """Maximum MB of bodies and answers that are held at a time; further requests are answered 429."""
    max_header_bytes: PositiveCount = 64 << 10
    """Maximum bytes of the address and headers of a request."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """Settings of calls to another server."""

    upstream_key: str = KEY_VARIABLE
    """Environment variable that holds the API key of the server of --upstream; without the variable none is sent."""
    upstream_timeout_s: SecondsOfADay = 1_800.0
    """Maximum seconds until the server of --upstream has answered a call."""

    def __post_init__(self) -> None:
        check(self)
