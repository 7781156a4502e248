"""Run a gateway in this process: before the engine of a run's newest weights, or before another server.

Reads policies/ and follows new versions, as a worker does. Writes what ludic.gateway.gateway writes, and run.json of a
new root for the calls of another server. With a command, opens an episode for it, runs it, and seals the episode.
Before another server it needs no torch.
"""

import asyncio
import logging
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ludic.app.launch.config import GatewayConfig
from ludic.base import RECORDED_ENV, keep_secret, temporary_folder
from ludic.engines import EngineConfig, EngineSetup, SamplingParams
from ludic.errors import ConfigError, MissingRootError
from ludic.gateway import (
    Backend,
    EpisodeResult,
    Gateway,
    GatewaySettings,
    HttpSettings,
    OpenEpisode,
    UpstreamBackend,
    UpstreamSettings,
    agent_variables,
    check_upstream,
    find_model,
    key_digest,
    make_key,
    serve,
)
from ludic.gateway.upstream import NO_LIMIT
from ludic.root import Root, held_life
from ludic.root.weights import base_of_run
from ludic.run import RunConfig, put_run, run_of

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
