"""What a worker logs of failed rollouts: the first of each kind with its traceback, then counts."""

import logging
from dataclasses import replace

import pytest
from strategies import make_batch

from ludic.records.rollout import GROUP_CLOSED, Rollout
from ludic.rollouts.failures import FailureLog

GOOD = make_batch(num_groups=1, group_size=2).groups[0].rollouts[0]


def failed(error: str | None, traceback: str | None = None) -> Rollout:
    return replace(GOOD, env_name="own", error=error, traceback=traceback)


def logged(caplog: pytest.LogCaptureFixture, *batches: list[Rollout]) -> list[str]:
    log = FailureLog(logging.getLogger("ludic.test"))
    for batch in batches:
        log.take(batch)
    return [record.getMessage() for record in caplog.records]


def test_the_first_of_a_kind_is_logged_with_its_traceback_and_then_counts(caplog: pytest.LogCaptureFixture) -> None:
    error, trace = "KeyError: {} (own.py:3, in score)", "Traceback:\n  own.py, line 3\nKeyError: {}"
    rollouts = [failed(error.format(number), trace.format(number)) for number in range(120)]
    assert logged(caplog, rollouts[:5], rollouts[5:9], rollouts[9:20], rollouts[20:]) == [
        "a rollout of own failed: KeyError: 0 (own.py:3, in score)\nTraceback:\n  own.py, line 3\nKeyError: 0",
        "20 rollouts of own by now: KeyError: 9 (own.py:3, in score)",
        "120 rollouts of own by now: KeyError: 20 (own.py:3, in score)",
    ]


def test_another_line_or_another_class_is_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    errors = ["KeyError: 1 (own.py:3, in score)", "KeyError: 1 (own.py:4, in score)", "OSError: 1 (own.py:3, in score)"]
    assert logged(caplog, [failed(error) for error in errors]) == [f"a rollout of own failed: {e}" for e in errors]


def test_messages_without_a_place_that_differ_in_a_value_are_of_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    errors = [f"TypeError: score returned '{word}', wanted a number or a Score" for word in ("a", "b", "c")]
    assert logged(caplog, [failed(error) for error in errors]) == [f"a rollout of own failed: {errors[0]}"]


def test_a_tool_that_failed_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [failed(None, f"Traceback:\n  own.py, line 9\nKeyError: {number}") for number in range(10)]
    first = "a tool of a rollout of own failed: KeyError: 0\nTraceback:\n  own.py, line 9\nKeyError: 0"
    assert logged(caplog, rollouts) == [first, "10 rollouts with a failed tool of own by now: KeyError: 0"]


def test_good_rollouts_and_those_of_closed_groups_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, [GOOD, failed(GROUP_CLOSED)]) == []
