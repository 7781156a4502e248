"""Limits of an episode."""

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass

from ludic.agents.failures import LimitReachedError
from ludic.defaults import MAX_OBSERVATION_CHARACTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode."""

    max_steps: int | None = None
    """Maximum steps of each agent in the environment; None takes the environment's own, else MAX_STEPS."""
    max_seq_len: int | None = None
    """Maximum tokens of prompt and completion together; None is the engine's."""
    max_observation_characters: int | None = MAX_OBSERVATION_CHARACTERS
    """Maximum characters of an observation; the rest is cut. None is no limit."""
    max_tool_rounds: int = 16
    """Maximum completions with tool calls before one step of the environment."""
    max_tool_calls: int = 16
    """Maximum tool calls of one completion that are run; the others get an error."""
    accept_incomplete: bool = False
    """Pass a completion that reached max_tokens on, instead of refusing it."""
    timeout_s: float | None = None
    """Maximum seconds of an episode; None is no limit."""
    max_depth: int = 1
    """Maximum number of agents above one that works on a task that was handed to it."""
    max_children: int = 8
    """Maximum tasks that are handed on in an episode."""
    max_child_tokens: int | None = None
    """Maximum tokens that are sampled for all of these tasks; None is no limit."""


class Ending:
    """Lets whoever has started an episode end it early."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the episode was ended; None if nobody did."""
        self._limit: asyncio.Timeout | None = None

    def end(self, reason: str) -> None:
        """End the episode, which stores what it has, with an error. reason: the error."""
        self.reason = reason
        self._expire()

    def watch(self, limit: asyncio.Timeout | None) -> None:
        """Let the limit end the episode, at once if it has been ended already. None: the episode is over."""
        self._limit = limit
        if self.reason is not None:
            self._expire()

    def _expire(self) -> None:
        if self._limit is not None:
            with suppress(RuntimeError):  # the episode is about to end
                self._limit.reschedule(asyncio.get_running_loop().time())


ending: ContextVar[Ending | None] = ContextVar("ending", default=None)
"""How to end the episode that begins in this context."""


class TokenBudget:
    """Tokens that several agents share, which may sample at the same time."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    def reserve(self, wanted: int) -> int:
        """Return at most `wanted` tokens, at least one. Raises LimitReachedError if none is left."""
        if self.num_left <= 0:
            raise LimitReachedError("budget", "the tokens for tasks that are handed on are used up or reserved")
        granted = min(wanted, self.num_left)
        self.num_left -= granted
        return granted

    def give_back(self, unused: int) -> None:
        """Give back tokens that were reserved and not sampled."""
        self.num_left += unused
