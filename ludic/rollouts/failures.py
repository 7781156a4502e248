"""Log errors of users' code while rollouts are sampled: the first of each kind with its traceback, then counts."""

import logging
import re
from collections import Counter
from collections.abc import Iterable

from ludic.records import GROUP_CLOSED, Rollout
from ludic.settings import place_of

_MOST_KINDS = 100
"""Maximum kinds that are logged; messages without a code position may differ in each rollout."""
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


class FailureLog:
    """Logs failed rollouts, and tools that failed in rollouts that continued. Two failures are of one kind if they have
    the same environment, error class and line of code."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._counts: Counter[tuple[str, str]] = Counter()

    def take(self, rollouts: Iterable[Rollout]) -> None:
        """Log the first rollout of each kind; later only the count, at 10, at 100 and so on."""
        found: Counter[tuple[str, str]] = Counter()
        first: dict[tuple[str, str], Rollout] = {}
        for rollout in rollouts:
            if rollout.error != GROUP_CLOSED and (rollout.error or rollout.traceback):
                kind = rollout.env_name, _kind(rollout)
                found[kind] += 1
                first.setdefault(kind, rollout)
        for kind, num in found.items():
            if kind in self._counts or len(self._counts) < _MOST_KINDS:
                self._log_failures(first[kind], self._counts[kind], self._counts[kind] + num)
                self._counts[kind] += num

    def _log_failures(self, rollout: Rollout, before: int, now: int) -> None:
        what = "a rollout" if rollout.error else "a tool of a rollout"
        if not before:
            text = f"{what} of {rollout.env_name} failed: {_line(rollout)}"
            self._logger.warning("%s", f"{text}\n{rollout.traceback}" if rollout.traceback else text)
        if len(str(now)) > len(str(max(before, 1))):
            what = "rollouts" if rollout.error else "rollouts with a failed tool"
            self._logger.warning("%d %s of %s by now: %s", now, what, rollout.env_name, _line(rollout))


def _line(rollout: Rollout) -> str:
    return rollout.error or (rollout.traceback or "").splitlines()[-1]


def _kind(rollout: Rollout) -> str:
    if rollout.error is None:
        return (rollout.traceback or "").rpartition("\n")[0]
    name, _, message = rollout.error.partition(": ")
    return f"{name}{place_of(rollout.error) or _VARYING.sub('', message)}"
