"""Define an episode of a gateway: its facts, its key, its calls in memory, and what each call may extend.

Pure; no I/O. The gateway (ludic.gateway.gateway) stores and reads.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from ludic.base import RECORDED_ENV
from ludic.records import Purpose

EpisodeOutcome = Literal["complete", "failed", "given_up", "expired"]
"""How an episode was sealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """What is known of an episode before its first call, for its rows."""

    env_name: str = RECORDED_ENV
    env_example_id: str | None = None
    """Id of the example; None is the episode's id."""
    group_id: str | None = None
    """Episodes of one example that share a baseline; None is a group of the episode alone."""
    group_index: int = 0
    group_size: int = 1
    request_index: int | None = None
    """Position of the episode in the run's schedule; None if no schedule asked for it."""
    purpose: Purpose = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """How an episode ended, and its score."""

    outcome: EpisodeOutcome = "complete"
    error: str | None = None
    """One line; None unless the outcome is failed, given_up or expired."""
    reward: float | None = None
    """None if it is not scored (yet)."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    scored_call_id: str | None = None
    """Call whose answer was scored, if the scorer knows it."""
    exit_code: int | None = None
    """Of an agent that is a command."""
    last_output: str | None = None
    """End of the output of such an agent."""


@dataclass(slots=True, kw_only=True, eq=False)
class OpenEpisode:
    """An attempt at an episode that this gateway holds."""

    episode_id: str
    attempt: int
    seed: int
    """Seeds of the calls follow from it and from their numbers."""
    key_digest: str
    """SHA-256 of the API key, hexadecimal."""
    facts: EpisodeFacts
    opened_at: datetime
    expires_at: datetime
    key: str | None = field(default=None, repr=False)
    """The API key, only from `open_episode`; it is stored nowhere, and None after a take-over."""
    result: EpisodeResult | None = None
    """None while it is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCounts:
    """Calls and sampled tokens of an episode so far, in this life of the gateway."""

    num_calls: int = 0
    """Calls that were sampled and stored."""
    num_replayed_calls: int = 0
    """Calls that were answered from stored ones, after the agent was started again."""
    sampled_tokens: int = 0
    replayed_tokens: int = 0
    """Sampled tokens of the replayed calls."""


def make_key() -> str:
    """Return a new API key, with 256 random bits."""
    return f"sk-ludic-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> str:
    """Return the SHA-256 of a key, hexadecimal; any text has one."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def agent_variables(url: str, episode_id: str, attempt: int, key: str) -> dict[str, str]:
    """Return the environment variables by which agents find the gateway and their episode. url: without /v1."""
    base = f"{url}/e/{episode_id}/{attempt}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
    }
