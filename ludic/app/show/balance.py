"""Compute how much trainer and workers wait for each other, and how many workers would keep both busy. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import fmean
from typing import Literal

from ludic.base import plural
from ludic.records import Row

# A step costs the trainer b seconds of work, and the workers together s seconds of sampling, whichever groups filters
# drop or steps use again. Without waiting the trainer takes 1/b steps a second, and n workers sample for n/s. So
# n = s/b workers keep the trainer busy and are busy themselves.

_SHORTEST_HANDOFF_S = 0.1
"""Seconds of a step in which both sides wait that are worth a word."""
MOST_WAITING = 0.1
"""Share of its time up to which a side does not count as waiting."""
_WORK = ("step_s", "publish_s", "checkpoint_s")
"""Seconds of a step in which the trainer does not wait for rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Shares of time that trainer and workers work, over the same steps."""

    trainer_busy: float
    """Share of its time in which the trainer does not wait for rollouts, from 0 to 1."""
    worker_busy: float
    """Share of their time in which workers sample and do not wait for the budget or for weights, from 0 to 1."""
    num_workers: int
    """Number of workers that sampled in this time."""
    num_steps: int
    """Number of these steps: the newest ones, without those before the first known rollouts."""
    balanced_workers: float
    """Number of average workers that would keep the trainer busy and be busy themselves."""
    handoff_s: float
    """Mean seconds of a step in which the trainer waits and no worker samples: weights or rollouts are on their way."""

    @property
    def waiting(self) -> Literal["trainer", "workers", "both", "none"]:
        """The sides that wait for more than a tenth of their time."""
        trainer, workers = (1 - busy > MOST_WAITING for busy in (self.trainer_busy, self.worker_busy))
        if trainer and workers:
            return "both"
        return "trainer" if trainer else "workers" if workers else "none"

    def __str__(self) -> str:
        workers = f"{plural(self.num_workers, 'worker')} sample{'s' if self.num_workers == 1 else ''}"
        trainer, sampling = f"works {self.trainer_busy:.0%} of the time", f"{workers} {self.worker_busy:.0%}"
        match self.waiting:
            case "trainer":
                return f"workers are the bottleneck: {sampling} of the time, and the trainer {trainer}"
            case "workers":
                return f"the trainer is the bottleneck: it {trainer}, and {sampling}"
            case "none":
                return f"both sides are busy: the trainer {trainer}, and {sampling}"
        text = f"trainer and workers wait for each other: the trainer {trainer}, and {sampling}"
        if self.handoff_s < _SHORTEST_HANDOFF_S:
            return text
        return f"{text}; in {self.handoff_s:.2g} s of each step both wait, for weights or rollouts to arrive"

    def advice(self, batches_ahead: int | None) -> str:
        """Return what makes the run faster; "" if both sides are busy. batches_ahead: the setting of the run."""
        match self.waiting:
            case "trainer":
                return f"about {self.balanced_workers:,.1f} workers would keep the trainer busy (--num-workers)"
            case "workers":
                return f"about {self.balanced_workers:,.1f} workers would be enough; more --ranks train faster"
            case "none":
                return ""
        if batches_ahead is None:
            return "a higher --max-off-policy-steps lets workers sample while the trainer works"
        return f"a run without --batches-ahead (here {batches_ahead}) lets workers sample while the trainer works"


def find_balance(steps: Sequence[Row], calls: Iterable[Row]) -> Balance | None:
    """Return the balance over the steps of the newest attempt; None if no step is within the known calls.

    steps: rows of gradient steps, in order. calls: rows of workers, oldest first, all since the first of them. Workers'
    times are clipped to the steps, so a dead worker counts only for its lifetime, and a pause of the trainer not at
    all. Clocks of the machines may differ by less than a step.
    """
    spans = list(_spans(calls))
    if not steps or not spans:
        return None
    known_since = min(span.end for span in spans)
    own = [row for row in steps if row["attempt_id"] == steps[-1]["attempt_id"]]
    known = [row for row in own if _start(row) >= known_since]
    work_s, wait_s = sum(map(_work_s, known)), sum(row["wait_s"] or 0.0 for row in known)
    parts = [(span, _within(span, known)) for span in spans]
    sampled_s, idle_s = (sum(part[side] for _, part in parts) for side in (0, 1))
    if work_s <= 0 or sampled_s <= 0:
        return None
    return Balance(
        trainer_busy=work_s / (work_s + wait_s),
        worker_busy=sampled_s / (sampled_s + idle_s),
        num_steps=len(known),
        num_workers=len({span.worker_id for span, (sampled, _) in parts if sampled > 0}),
        balanced_workers=sampled_s / work_s,
        handoff_s=fmean(_idle_s(step, spans) for step in known),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """One call of a worker's engine, after its wait."""

    worker_id: str
    start: datetime
    """Beginning of the wait."""
    middle: datetime
    """End of the wait and beginning of sampling."""
    end: datetime


def _spans(calls: Iterable[Row]) -> Iterator[_Span]:
    """Yield each call once; it has a row for each environment, and the next call begins after they are written."""
    ends: dict[str, datetime] = {}
    for row in calls:
        worker_id, end = row["worker_id"], row["created_at"]
        middle = end - timedelta(seconds=row["step_s"] or 0.0)
        if worker_id in ends and middle < ends[worker_id]:
            continue
        ends[worker_id] = end
        start = middle - timedelta(seconds=row["wait_s"] or 0.0)
        yield _Span(worker_id=worker_id, start=start, middle=middle, end=end)


def _within(span: _Span, steps: Sequence[Row]) -> tuple[float, float]:
    """Return the seconds of sampling and of waiting of a call that lie within steps."""
    times = [(_start(row), row["created_at"]) for row in steps]
    sampled_s = sum(_overlap_s(span.middle, span.end, *of_step) for of_step in times)
    return sampled_s, sum(_overlap_s(span.start, span.middle, *of_step) for of_step in times)


def _idle_s(step: Row, spans: Sequence[_Span]) -> float:
    """Return the seconds of a step's wait, which comes before its work, in which no worker samples."""
    start, idle_s = _start(step), 0.0
    end = start + timedelta(seconds=step["wait_s"] or 0.0)
    for span in sorted(spans, key=lambda span: span.middle):
        idle_s += max(0.0, (min(span.middle, end) - start).total_seconds())
        start = max(start, span.end)
    return idle_s + max(0.0, (end - start).total_seconds())


def _overlap_s(start: datetime, end: datetime, other_start: datetime, other_end: datetime) -> float:
    return max(0.0, (min(end, other_end) - max(start, other_start)).total_seconds())


def _start(step: Row) -> datetime:
    return step["created_at"] - timedelta(seconds=_work_s(step) + (step["wait_s"] or 0.0))


def _work_s(step: Row) -> float:
    return sum(step[name] or 0.0 for name in _WORK)
