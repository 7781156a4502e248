"""Calls of an environment end in time; where Python can't end them, the worker does."""

import asyncio
import re
import signal
import threading
import time
from contextlib import suppress

import pytest

from ludic.environments import limits
from ludic.environments.environment import Example, Score, Transition
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.single_turn import SingleTurn
from ludic.errors import TimeLimitError
from ludic.records.rollout import Message

SHORT = TimeLimit(timeout_s=0.05)
EXAMPLE = Example(example_id="train-3", messages=(Message(role="user", content="?"),))


def loop():
    while True:
        pass


def swallow():
    while True:
        try:
            loop()
        except Exception:
            continue


def backtrack():
    re.match(r"(a+)+$", "a" * 60 + "b")


def multiply():
    return 9**9**9


@pytest.mark.parametrize("endless", [loop, swallow, backtrack, multiply, lambda: time.sleep(1e6)])
def test_an_endless_call_is_interrupted(endless):
    with pytest.raises(TimeLimitError, match=r"^score did not return within 0\.05 s; --env-timeout-s sets the limit$"):
        SHORT.call("score", endless)


def test_a_call_that_takes_the_interruption_is_interrupted_again(monkeypatch):
    """A library may have a bare `except`, as those of math-verify and SymPy."""

    def swallow_everything():
        for _ in range(3):
            with suppress(BaseException):
                loop()
        multiply()

    monkeypatch.setattr(limits, "GRACE_S", 0.05)
    with pytest.raises(TimeLimitError, match="did not return within"):
        SHORT.call("score", swallow_everything)


def test_a_call_in_time_returns_and_leaves_no_alarm_behind():
    assert SHORT.call("score", lambda: 3) == 3
    time.sleep(0.1)


def test_what_a_call_raises_passes():
    with pytest.raises(KeyError):
        SHORT.call("score", lambda: {}["a"])


def test_without_a_limit_nothing_is_timed_or_announced():
    told = []
    assert TimeLimit(announce=announcing(told)).call("score", lambda: signal.getitimer(signal.ITIMER_REAL)[1]) == 0
    assert told == []


def announcing(told):
    """Notes each call, and its end as "-" and the call."""

    def announce(call):
        told.append(call)
        return lambda: told.append(f"-{call}")

    return announce


def test_each_call_is_announced_and_its_end_too():
    told = []
    limit = TimeLimit(timeout_s=0.05, announce=announcing(told))
    limit.call("reset", lambda: None)
    with pytest.raises(TimeLimitError):
        limit.call("step", loop)
    assert told == ["reset", "-reset", "step", "-step"]


def test_the_alarm_of_who_calls_still_comes():
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append("outer"))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        SHORT.call("score", lambda: None)
        time.sleep(0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)
    assert heard == ["outer"]


def test_the_time_of_the_call_counts_for_the_timer_of_who_calls():
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    outer = signal.setitimer(signal.ITIMER_REAL, 100, 7)
    try:
        TimeLimit(timeout_s=5).call("score", lambda: time.sleep(0.3))
        remaining, interval = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)
    assert (remaining < 99.75, interval) == (True, pytest.approx(7))


def test_a_timer_that_ran_out_during_the_call_rings_after_it():
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append("outer"))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        TimeLimit(timeout_s=5).call("score", lambda: time.sleep(0.2))
        time.sleep(0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)
    assert heard == ["outer"]


def take_the_alarm():
    """As a scorer that limits its own work does."""
    signal.alarm(1)
    signal.alarm(0)
    time.sleep(0.2)


def test_a_call_that_switches_the_alarm_off_fails_when_it_returns_late():
    with pytest.raises(TimeLimitError, match=r"^score did not return within 0\.05 s"):
        SHORT.call("score", take_the_alarm)


def test_in_another_thread_a_call_that_returns_late_fails():
    errors = []

    def call():
        try:
            SHORT.call("score", lambda: time.sleep(0.2))
        except TimeLimitError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert errors == ["score did not return within 0.05 s; --env-timeout-s sets the limit"]


def test_in_another_thread_a_call_is_announced_though_no_alarm_reaches_it():
    told, results = [], []
    limit = TimeLimit(timeout_s=0.05, announce=announcing(told))
    thread = threading.Thread(target=lambda: results.append(limit.call("score", lambda: 3)))
    thread.start()
    thread.join()
    assert (told, results) == (["score", "-score"], [3])


class Question:
    def example(self, index, split):
        return EXAMPLE if index else loop()

    def score(self, example, answer):
        return Score(reward=1.0) if answer else loop()


class Steps:
    def example(self, index, split):
        return EXAMPLE

    def reset(self, example):
        loop()

    def step(self, action):
        return Transition(observation=None, reward=1.0, terminated=True) if action else loop()


def call(held, method, *args):
    return asyncio.run(held.call(method, *args))


def test_an_environment_works_as_without_a_limit():
    held = LimitedEnvironments("q", lambda: SingleTurn(Question()), SHORT)()
    assert call(held, "reset", held.example(1, "train")) == EXAMPLE.messages
    assert call(held, "step", "yes").reward == 1.0


@pytest.mark.parametrize(
    ("make", "calls", "says"),
    [
        (lambda: SingleTurn(Question()), lambda env: env.example(0, "heldout"), "q: example of index 0, heldout did"),
        (
            lambda: SingleTurn(Question()),
            lambda env: [call(env, "reset", EXAMPLE), call(env, "step", "")],
            "q: score on example 'train-3'",
        ),
        (Steps, lambda env: call(env, "reset", EXAMPLE), "q: reset on example 'train-3' did not return"),
        (Steps, lambda env: call(env, "step", ""), "q: step on example ''"),
        (loop, lambda env: None, "q: its constructor did not return"),
    ],
)
def test_an_endless_call_is_named(make, calls, says):
    with pytest.raises(TimeLimitError, match=says):
        calls(LimitedEnvironments("q", make, SHORT)())


class Scores:
    """Endless on examples whose id says so, and counts its calls."""

    num_calls = 0

    def example(self, index, split):
        return EXAMPLE

    def score(self, example, answer):
        Scores.num_calls += 1
        return Score(reward=1.0) if answer else loop()


def score(environments, answer):
    """The error of scoring an answer in a new environment; None where it has none."""
    held = environments()
    call(held, "reset", EXAMPLE)
    try:
        call(held, "step", answer)
    except TimeLimitError as error:
        return str(error)


@pytest.fixture
def scores():
    Scores.num_calls = 0
    return lambda stop=None: LimitedEnvironments("q", lambda: SingleTurn(Scores()), SHORT, stop)


def test_the_first_timeout_of_an_environment_is_logged_at_once(scores, caplog):
    environments = scores()
    score(environments, "")
    assert [record.getMessage() for record in caplog.records] == [
        "environment q: score on example 'train-3' did not return within 0.05 s; --env-timeout-s sets the limit; "
        "further timeouts of this environment are not logged"
    ]
    score(environments, "")
    assert len(caplog.records) == 1


def test_after_three_timeouts_in_a_row_a_method_is_not_called_until_the_restart(scores):
    environments = scores()
    answers = ("", "", "yes", "", "", "")  # two timeouts in a row, then three
    assert [score(environments, answer) is None for answer in answers] == [bool(answer) for answer in answers]
    assert Scores.num_calls == 6
    said = "environment q: score on example 'train-3' was not called, after timeouts in a row: 3"
    assert [score(environments, answer) for answer in ("", "yes")] == [said, said]
    assert Scores.num_calls == 6
    environments.restart()
    assert score(environments, "yes") is None


def test_a_worker_that_is_to_stop_waits_for_one_timeout(scores):
    stop = threading.Event()
    environments = scores(stop)
    stop.set()
    assert score(environments, "yes") is None
    assert "did not return" in score(environments, "")
    assert "was not called, after timeouts in a row: 1" in score(environments, "")
