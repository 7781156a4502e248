"""Score stored rollouts and append the scores to scores/.

Reads rollouts/ or evals/, one row group at a time. A rollout that this version of the scorer has scored is left out, so
a scoring that was interrupted goes on when it is started again. Two at the same time may score a rollout twice; the
view `scores` counts it once. Raises ConfigError, QueryError, StoreError, and TimeLimitError if the scorer hangs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa

from ludic.by_name import find_by_name
from ludic.defaults import Track, untracked
from ludic.records import Rollout
from ludic.results import Part, Result, number, plural
from ludic.schema import from_table
from ludic.scoring.calls import Scored, score_all
from ludic.scoring.options import ScoreOptions
from ludic.scoring.outcome import SCORE
from ludic.scoring.scorer import Scorer, UsersScorer
from ludic.sql.query import open_result
from ludic.store import Root
from ludic.store.files import whole_rows
from ludic.store.tables import Row, ScoreLog, check_scorer_name

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


def _make_scorer(options: ScoreOptions) -> Scorer:
    if options.scorer is not None:
        return UsersScorer(options.scorer)
    scorer: Scorer = find_by_name(JUDGE)(options)
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


def _rows(scorer: Scorer, scored: Scored) -> Iterator[Row]:
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

    def add(self, scored: Scored) -> None:
        outcome = scored.outcome
        self.num_input_tokens += outcome.num_input_tokens or 0
        self.num_output_tokens += outcome.num_output_tokens or 0
        if outcome.cost is not None:
            self.cost = (self.cost or 0.0) + outcome.cost
        if outcome.error is None:
            self.num_scored += 1
        else:
            self.reasons[outcome.error] += 1
