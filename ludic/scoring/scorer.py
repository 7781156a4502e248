"""Scorers: the contract that users' functions and judges share, and users' functions.

    def score(rollout: ludic.Rollout) -> float | dict[str, float] | CostedScore

A user's function is named as path/to/file.py:function and may be asynchronous. It is the user's own file, of this
machine: no root can name one, so it needs no consent. Raises ConfigError if it does not load.
"""

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from ludic.code.consent import CodeUse
from ludic.code.kinds import ROLLOUT_SCORER, find_own
from ludic.code.run import describe_failure, only_exceptions
from ludic.records import Rollout
from ludic.scoring.outcome import Outcome, failed, to_outcome
from ludic.waits import SideLoop


class Scorer(Protocol):
    """Scores rollouts, several at the same time in threads."""

    name: str
    """Default name in the table."""
    version: str
    """Digest of everything that a score depends on besides the rollout, in hexadecimal."""
    model: str | None
    """Model of a judge."""
    prompt: str | None
    """Template of a judge's prompt."""

    def score(self, rollout: Rollout, timeout_s: float) -> Outcome:
        """Score a rollout; never raises. Should return within timeout_s, after which its outcome is ignored."""

    def close(self) -> None:
        """Release connections."""


class UsersScorer:
    """A function in a user's file, as a Scorer."""

    model: str | None = None
    prompt: str | None = None

    def __init__(self, source: str) -> None:
        """Run the file. Raises ConfigError."""
        own = find_own(ROLLOUT_SCORER, source)
        path, _, self.name = source.rpartition(":")
        self._path: Path = own.file.path
        self._function: Callable[[Rollout], Any] = own.value
        self.version = CodeUse(role="scorer", setting=source).key({path: own.file})
        # All calls share an event loop, so that the function may keep a client open between calls.
        self._loop = SideLoop()

    def score(self, rollout: Rollout, timeout_s: float) -> Outcome:
        try:
            with only_exceptions():
                result = self._function(rollout)
                return to_outcome(self._loop.run(_result(result), timeout_s) if inspect.isawaitable(result) else result)
        except Exception as error:
            return failed(describe_failure(self._path, error))

    def close(self) -> None:
        """End the event loop."""
        self._loop.close()


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
