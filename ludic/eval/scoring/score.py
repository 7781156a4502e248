"""Score stored rollouts and append the scores to scores/.

Reads rollouts/ or evals/, one row group at a time. Rollouts that this version of the scorer has scored are skipped, so
an interrupted scoring continues when it is started again. Two concurrent scorings may score a rollout twice; the view
`scores` counts it once. Raises ConfigError, QueryError, StoreError, and TimeLimitError if the scorer hangs.
"""

import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import pyarrow as pa

from ludic.base import Part, Result, Track, find_by_name, number, plural, untracked
from ludic.errors import ConfigError, TimeLimitError
from ludic.eval.scoring.options import ScoreOptions
from ludic.eval.scoring.outcome import SCORE, Outcome, failed, to_outcome
from ludic.records import Rollout, Row, from_table
from ludic.root import Root
from ludic.root.rows import ScoreLog, check_scorer_name, whole_rows
from ludic.root.sql import open_result
from ludic.settings import (
    ROLLOUT_SCORER,
    CodeUse,
    SideLoop,
    describe_failure,
    find,
    find_own,
    misfit_of_call,
    only_exceptions,
    takes_settings,
)

# The predicate has its own lines, so that a comment at its end does not hide the parenthesis.
_CHOSEN = """
with chosen as (
    select rollout_id
    from {table}
    where (
{where}
    )
),

done as (
    select distinct rollout_id
    from scores
    where scorer = $scorer and scorer_version = $scorer_version and (value is not null or not $retry_failed)
)

select chosen.rollout_id, done.rollout_id is not null as is_done
from chosen
left join done using (rollout_id)
"""
_MOST_REASONS = 5
_SHOWN_DIGITS = 12
JUDGE = "ludic.adapters.judge:JudgeScorer"
"""The Scorer of options with a judge_url."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScoreReport(Result):
    """Result of scoring."""

    root: str
    """URL or path of the root."""
    scorer: str
    version: str
    """Version of the scorer, a digest in hexadecimal."""
    num_scored: int
    """Rollouts that got values."""
    num_failed: int
    """Rollouts that the scorer failed on; their reasons are stored."""
    num_done_before: int
    """Rollouts that this version had scored before."""
    num_input_tokens: int
    num_output_tokens: int
    cost: float | None
    """Money; None if no call stated its cost."""
    reasons: Mapping[str, int]
    """The most frequent reasons of failures, with their counts."""

    def parts(self) -> Iterator[Part]:
        """The counts, in a sentence."""
        counts = [f"{plural(self.num_scored, 'rollout')} scored", f"{self.num_failed:,} failed"]
        if self.num_done_before:
            counts.append(f"{self.num_done_before:,} scored before")
        if self.num_input_tokens or self.num_output_tokens:
            counts.append(f"{self.num_input_tokens:,} tokens read, {self.num_output_tokens:,} written")
        if self.cost is not None:
            counts.append(f"cost {number(self.cost)}")
        yield f"{self.scorer}@{self.version[:_SHOWN_DIGITS]}: {'; '.join(counts)}"

    @property
    def remarks(self) -> Sequence[str]:
        """The most frequent reasons of failures."""
        return [f"{count:,} failed: {reason}" for reason, count in self.reasons.items()]


def score_rollouts(root: Root, options: ScoreOptions, track: Track = untracked) -> ScoreReport:
    """Score the rollouts that the options choose, and return the counts."""
    scorer = _make_scorer(options)
    try:
        name = check_scorer_name(options.name or scorer.name)
        ids, num_done = _choose(root, options, name, scorer.version)
        totals = _Totals()
        score = partial(scorer.score, timeout_s=options.scorer_timeout_s)
        found = score_all(
            _read(root, options, ids), score, concurrency=options.concurrency, timeout_s=options.scorer_timeout_s
        )
        with ScoreLog(root, name) as log:
            for scored in track(found, len(ids), "rollouts"):
                for row in _rows(scorer, scored):
                    log.append(row)
                totals.add(scored)
    finally:
        scorer.close()
    return ScoreReport(
        root=root.url,
        scorer=name,
        version=scorer.version,
        num_scored=totals.num_scored,
        num_failed=totals.reasons.total(),
        num_done_before=num_done,
        num_input_tokens=totals.num_input_tokens,
        num_output_tokens=totals.num_output_tokens,
        cost=totals.cost,
        reasons=dict(totals.reasons.most_common(_MOST_REASONS)),
    )


def _make_scorer(options: ScoreOptions) -> "Scorer":
    if options.scorer is not None and not takes_settings(ROLLOUT_SCORER, options.scorer):
        return UsersScorer(options.scorer)
    make = find_by_name(JUDGE) if options.scorer is None else find(ROLLOUT_SCORER, options.scorer)
    scorer: Scorer = make(options)
    return scorer


def _choose(root: Root, options: ScoreOptions, scorer: str, version: str) -> tuple[set[str], int]:
    """Return the ids of rollouts to score, and the number of those that were scored before."""
    query = _CHOSEN.format(table=options.table, where=options.where or "true")
    params = {"scorer": scorer, "scorer_version": version, "retry_failed": options.retry_failed}
    ids: set[str] = set()
    num_done = 0
    with open_result([root], query, params) as result:
        for batch in result:
            for rollout_id, is_done in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                num_done += is_done
                if not is_done:
                    ids.add(rollout_id)
    return ids, num_done


def _read(root: Root, options: ScoreOptions, ids: set[str]) -> Iterator[Rollout]:
    if not ids:
        return
    for batch in whole_rows(root, options.table, ids):
        for part in from_table(pa.Table.from_batches([batch])):
            for group in part.groups:
                yield from group.rollouts


def _rows(scorer: "Scorer", scored: "Scored") -> Iterator[Row]:
    """Yield the rows of one call. Only the first one has its costs, so that sums over rows are right."""
    outcome = scored.outcome
    costs: dict[str, Any] = {
        "num_input_tokens": outcome.num_input_tokens,
        "num_output_tokens": outcome.num_output_tokens,
        "cost": outcome.cost,
        "duration_s": scored.duration_s,
    }
    about = {
        "rollout_id": scored.rollout_id,
        "scorer_version": scorer.version,
        "model": scorer.model,
        "prompt": scorer.prompt,
        "error": outcome.error,
        "created_at": datetime.now(UTC),
    }
    for name, value in ({SCORE: None} if outcome.values is None else outcome.values).items():
        yield {**about, **costs, "name": name, "value": value}
        costs = {}


@dataclass(slots=True)
class _Totals:
    num_scored: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cost: float | None = None
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, scored: "Scored") -> None:
        outcome = scored.outcome
        self.num_input_tokens += outcome.num_input_tokens or 0
        self.num_output_tokens += outcome.num_output_tokens or 0
        if outcome.cost is not None:
            self.cost = (self.cost or 0.0) + outcome.cost
        if outcome.error is None:
            self.num_scored += 1
        else:
            self.reasons[outcome.error] += 1


# --- Scorers -------------------------------------------------------------------------------------------
# The contract that users' functions and judges share, and users' functions:
#
#     def score(rollout: ludic.Rollout) -> float | dict[str, float] | CostedScore
#
# A user's function is named as path/to/file.py:function and may be asynchronous. It is the user's own file, of this
# machine: no root can name one, so it needs no consent. Raises ConfigError if it does not load.


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
        if problem := misfit_of_call(own.value, ["rollout"]):
            raise ConfigError(f"scorer {source} {problem}")
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


# --- Calls in daemon threads, several at a time, with a time limit for each ----------------------------
# A thread can't be stopped: a call that exceeds its limit counts as failed, and its late outcome is dropped. Raises
# TimeLimitError once MOST_LOST such calls still run, since then the scorer hangs and threads would only pile up.

MOST_LOST = 64
"""Calls beyond their time limit that may still run."""

_GRACE_S = 1.0
"""Seconds beyond its limit in which a call may still return its own, better reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A rollout with its outcome."""

    rollout_id: str
    outcome: Outcome
    duration_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    rollout_id: str
    began: float


def score_all(
    rollouts: Iterator[Rollout], score: Callable[[Rollout], Outcome], *, concurrency: int, timeout_s: float
) -> Iterator[Scored]:
    """Yield every rollout's outcome in the order of completion. `score` must not raise."""
    answers: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
    running: dict[int, _Call] = {}
    num_begun = num_lost = 0
    while True:
        while len(running) < concurrency and (rollout := next(rollouts, None)) is not None:
            running[num_begun] = _Call(rollout.rollout_id, time.monotonic())
            _begin(num_begun, rollout, score, answers)
            num_begun += 1
        if not running:
            return
        # Calls begin in the order of their numbers, so the first one is overdue first.
        number, oldest = next(iter(running.items()))
        answer = _next_answer(answers, oldest.began + timeout_s + _GRACE_S)
        if answer is not None and answer[0] in running:
            yield _scored(running.pop(answer[0]), answer[1])
        elif answer is not None:
            num_lost -= 1
        else:
            num_lost += 1
            yield _scored(running.pop(number), failed(f"took longer than {timeout_s:g} s"))
            if num_lost >= MOST_LOST:
                raise TimeLimitError(
                    f"{num_lost} calls of the scorer have not returned within {timeout_s:g} s each, so no more are "
                    "begun; find out why it hangs, then score again, which continues with the rest"
                )


def _begin(
    number: int, rollout: Rollout, score: Callable[[Rollout], Outcome], answers: "SimpleQueue[tuple[int, Outcome]]"
) -> None:
    def run() -> None:
        answers.put((number, score(rollout)))

    Thread(target=run, daemon=True, name="ludic-scorer").start()


def _next_answer(answers: "SimpleQueue[tuple[int, Outcome]]", until: float) -> tuple[int, Outcome] | None:
    """Return the next answer; None if none arrives before a time of the monotonic clock."""
    try:
        return answers.get(timeout=max(0.0, until - time.monotonic()))
    except Empty:
        return None


def _scored(call: _Call, outcome: Outcome) -> Scored:
    return Scored(rollout_id=call.rollout_id, outcome=outcome, duration_s=time.monotonic() - call.began)
