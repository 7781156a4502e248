"""Run a gateway in this process: before the engine of a run's newest weights, or before another server.

Reads policies/ and follows new versions, as a worker does. Writes what ludic.gateway.gateway writes, and run.json of a
new root for the calls of another server. With a command, opens an episode for it, runs it, and seals the episode.
Before another server it needs no torch.
"""

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

KEY_VARIABLE = "LUDIC_GATEWAY_KEY"
_POLL_S = 0.5
_END_WITHIN_S = 10.0
"""Seconds between SIGTERM and SIGKILL to a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a gateway did."""

    num_calls: int
    """Calls of the command's episode."""
    exit_code: int | None = None
    """Of the command."""
    episode_id: str | None = None
    """Episode of the command."""
