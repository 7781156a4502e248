"""Define an episode of a gateway as its users see it: facts, key, end, counts. Pure; no I/O."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ludic.base import RECORDED_ENV
from ludic.records import Purpose, Row
from ludic.root import EpisodeEndKind

if TYPE_CHECKING:
    import pyarrow as pa


OWN_COLUMNS: Mapping[str, Any] = MappingProxyType({"wanted": str | None, "example_columns": str | None, "extra": dict})
"""Columns of rollouts that an episode may set, and the types of their values. `extra` has the run's own columns."""


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
    request_index: int = 0
    """Position of the episode in the run's schedule."""
    purpose: Purpose = "train"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other values of its rows, by column of OWN_COLUMNS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """How an episode ended, and its score."""

    outcome: EpisodeEndKind = "complete"
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
    counts: CallCounts = CallCounts()
    left_behind: Sequence[str] = ()
    """call_ids of an earlier run of the agent, which the last one did not repeat, once it is sealed."""
    rows: Sequence[Row] = field(default=(), repr=False)
    """Rows of the calls of this life, once it is sealed, if the gateway keeps them."""
    found_rows: "pa.Table | None" = field(default=None, repr=False)
    """The same of earlier lives, as they are stored."""


def make_key() -> str:
    """Return a new API key, with 256 random bits. `mask` finds it by its beginning."""
    return f"sk-ludic-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> str:
    """Return the SHA-256 of a key, hexadecimal; any text has one."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def derived_seed(episode_id: str, attempt: int) -> int:
    """Return a seed of 63 bits that follows from an episode's name."""
    digest = hashlib.sha256(f"{episode_id} {attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def agent_variables(url: str, episode_id: str, attempt: int, key: str) -> dict[str, str]:
    """Return the environment variables by which agents find the gateway and their episode. url: without /v1."""
    base = f"{url}/e/{episode_id}/{attempt}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
    }
