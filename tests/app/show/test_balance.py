"""Who waits for whom, and how many workers would balance, in runs whose seconds are written by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ludic.app.show.balance import Balance, find_balance
from ludic.records.tables import arrow_schema

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def row(at_s: float, **values: Any) -> dict[str, Any]:
    return dict.fromkeys(arrow_schema("metrics").names) | {"created_at": NOON + timedelta(seconds=at_s)} | values


def step(at_s: float, *, step_s: float, wait_s: float, **values: Any) -> dict[str, Any]:
    """A step that ends `at_s` seconds after noon."""
    return row(at_s, **{"kind": "train", "attempt_id": 1, "step_s": step_s, "wait_s": wait_s, **values})


def call(at_s: float, *, step_s: float, wait_s: float = 0.0, worker_id: str = "w0", **values: Any) -> dict[str, Any]:
    return row(at_s, kind="worker", worker_id=worker_id, step_s=step_s, wait_s=wait_s, **values)


def every_10_s(end_s: float, **values: Any) -> list[dict[str, Any]]:
    return [call(at_s, **values) for at_s in range(10, int(end_s) + 1, 10)]


def test_a_trainer_that_waits_needs_more_workers() -> None:
    # Steps of 10 s from 10 to 40: 4 s of work, 6 s of waiting. One worker samples all the time.
    steps = [step(at_s, step_s=3, publish_s=0.75, checkpoint_s=0.25, wait_s=6) for at_s in (20, 30, 40)]
    found = find_balance(steps, every_10_s(40, step_s=10))
    # 10 s of sampling for 4 s of work
    assert found == Balance(
        trainer_busy=0.4, worker_busy=1.0, num_workers=1, num_steps=3, balanced_workers=2.5, handoff_s=0.0
    )
    assert found.waiting == "trainer"
    assert str(found) == (
        "workers are the bottleneck: 1 worker samples 100% of the time, and the trainer works 40% of the time"
    )
    assert found.advice(None) == "about 2.5 workers would keep the trainer busy (--num-workers)"


def test_workers_that_wait_are_too_many() -> None:
    steps = [step(at_s, step_s=10, wait_s=0) for at_s in (20, 30, 40)]
    calls = [each for w in "abcd" for each in every_10_s(40, step_s=2.5, wait_s=7.5, worker_id=w)]
    found = find_balance(steps, calls)
    assert found == Balance(
        trainer_busy=1.0, worker_busy=0.25, num_workers=4, num_steps=3, balanced_workers=1.0, handoff_s=0.0
    )
    assert found.waiting == "workers"
    assert str(found) == ("the trainer is the bottleneck: it works 100% of the time, and 4 workers sample 25%")
    assert found.advice(None) == "about 1.0 workers would be enough; more --ranks train faster"


def test_those_who_wait_in_turn_are_told_to_work_ahead() -> None:
    steps = [step(at_s, step_s=5, wait_s=5) for at_s in (20, 30, 40)]
    found = find_balance(steps, every_10_s(40, step_s=5, wait_s=5))
    assert (found.balanced_workers, found.waiting) == (1.0, "both")
    both = "trainer and workers wait for each other: the trainer works 50% of the time, and 1 worker samples 50%; in "
    assert str(found).startswith(both)
    assert found.advice(0) == "a run without --batches-ahead (here 0) lets workers sample while the trainer works"
    assert found.advice(None).startswith("a higher --max-off-policy-steps ")


def test_the_time_in_which_neither_works_is_that_of_their_handoffs() -> None:
    # Steps of 10 s from 10 to 40, each 6 s of waiting, then 4 s of work. A worker waits 5 s, samples from 1 to 4 s and
    # another one from 3 to 5 s after the step's begin, so in the first second and in the sixth nobody works.
    steps = [step(at_s, step_s=4, wait_s=6) for at_s in (20, 30, 40)]
    calls = [
        each
        for at_s in (0, 10, 20, 30)
        for each in (call(at_s + 4, step_s=3, wait_s=7), call(at_s + 5, step_s=2, wait_s=8, worker_id="w1"))
    ]
    found = find_balance(steps, calls)
    assert found.handoff_s == pytest.approx(2.0)
    assert str(found).endswith("; in 2 s of each step both wait, for weights or rollouts to arrive")


def test_a_tenth_of_waiting_is_balanced() -> None:
    found = find_balance([step(20, step_s=9.5, wait_s=0.5)], every_10_s(20, step_s=9.5, wait_s=0.5))
    assert (found.waiting, found.balanced_workers) == ("none", 1.0)
    assert str(found) == "both sides are busy: the trainer works 95% of the time, and 1 worker samples 95%"
    assert found.advice(0) == ""


def test_a_call_of_two_environments_counts_once() -> None:
    times = [(at_s + later_s, name) for at_s in (10, 20) for later_s, name in ((0.0, "cats"), (0.001, "dogs"))]
    rows = [call(at_s, step_s=9.5, env_name=name) for at_s, name in times]
    assert find_balance([step(20, step_s=9.5, wait_s=0.5)], rows).balanced_workers == 1.0


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ([], []),
        ([step(20, step_s=10, wait_s=0)], []),
        ([], [call(10, step_s=10)]),
        pytest.param([step(9, step_s=9, wait_s=0)], [call(10, step_s=10)], id="a step before the first known call"),
        pytest.param([step(30, step_s=9, wait_s=0)], [call(10, step_s=10)], id="nothing was sampled during the step"),
    ],
)
def test_without_data_there_is_no_balance(steps: list, calls: list) -> None:
    assert find_balance(steps, calls) is None


def test_a_dead_worker_counts_as_long_as_it_lived() -> None:
    steps = [step(at_s, step_s=10, wait_s=0) for at_s in (20, 30)]
    calls = [*every_10_s(30, step_s=10), *every_10_s(20, step_s=10.0, worker_id="dead")]
    found = find_balance(steps, calls)
    # 20 s of the living and 10 s of the dead worker, for 20 s of work
    assert (found.num_workers, found.balanced_workers, found.worker_busy) == (2, 1.5, 1.0)


def test_a_pause_of_the_trainer_does_not_count() -> None:
    # An hour passes between the steps; the worker samples for 10 s of it, and then waits.
    steps = [step(20, step_s=10, wait_s=0), step(3630, step_s=10, wait_s=0)]
    calls = [*every_10_s(30, step_s=10), call(3630, step_s=10.0, wait_s=3590)]
    found = find_balance(steps, calls)
    assert (found.balanced_workers, found.worker_busy, found.trainer_busy) == (1.0, 1.0, 1.0)


def test_steps_of_an_earlier_attempt_do_not_count() -> None:
    steps = [step(20, step_s=10, wait_s=0, attempt_id=0), step(30, step_s=5, wait_s=5)]
    assert find_balance(steps, every_10_s(30, step_s=10)).balanced_workers == 2.0
