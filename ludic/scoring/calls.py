"""Score rollouts in daemon threads, several at a time, with a time limit for each.

A thread can't be stopped: a call that exceeds its limit counts as failed, and its late outcome is dropped. Raises
TimeLimitError once MOST_LOST such calls still run, since then the scorer hangs and threads would only pile up.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from ludic.errors import TimeLimitError
from ludic.records import Rollout
from ludic.scoring.outcome import Outcome, failed

MOST_LOST = 64
"""Calls beyond their time limit that may still run."""

_GRACE_S = 1.0
"""Seconds beyond its limit that a call has to return by itself, with a better reason than ours."""


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
    """Yield every rollout's outcome, in the order in which they come. `score` must not raise."""
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
                    "begun; see why it hangs, then score again, which goes on with the rest"
                )


def _begin(
    number: int, rollout: Rollout, score: Callable[[Rollout], Outcome], answers: "SimpleQueue[tuple[int, Outcome]]"
) -> None:
    def run() -> None:
        answers.put((number, score(rollout)))

    Thread(target=run, daemon=True, name="ludic-scorer").start()


def _next_answer(answers: "SimpleQueue[tuple[int, Outcome]]", until: float) -> tuple[int, Outcome] | None:
    """Return the next answer; None if none comes before a time of the monotonic clock."""
    try:
        return answers.get(timeout=max(0.0, until - time.monotonic()))
    except Empty:
        return None


def _scored(call: _Call, outcome: Outcome) -> Scored:
    return Scored(rollout_id=call.rollout_id, outcome=outcome, duration_s=time.monotonic() - call.began)
