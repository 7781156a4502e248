"""The scorer math of qa/SOURCE, with the real package math-verify."""

import asyncio
import json
import signal
import threading
from pathlib import Path

import pytest

from ludic.environments import qa
from ludic.environments.environment import Environment, Transition
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.registry import make_environment

pytest.importorskip("math_verify", reason="math-verify is in the extra math")


@pytest.fixture
def ask(tmp_path: Path):
    """Returns an environment with one question, by its answer."""

    def make(answer: str) -> Environment:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "?", "answer": answer}))
        return make_environment(f"qa/{tmp_path}/rows.jsonl", {"scorer": "math", "heldout_share": 0})()

    return make


def score(environment: Environment, answer: str) -> Transition:
    environment.reset(environment.example(0, "train"))
    return environment.step(answer)


@pytest.mark.parametrize(
    ("answer", "given", "is_right"),
    [
        ("1/2", "so it is $\\frac{1}{2}$.", True),
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac{1}{2}", "\\boxed{0.5}", True),
        ("\\frac{1}{2}", "\\frac{2}{4}", True),
        ("\\frac{1}{2}", "2", False),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("$x^2 + 2x + 1$", "(x+1)^2", True),
        ("$x^2 + 2x + 1$", "(x-1)^2", False),
        ("72", "She has 72 apples left. The answer is 72.", True),
        ("72", "It is \\boxed{72}", True),
        ("72", "no idea", False),
        ("1,000", "1000", True),
        ("(1, 2)", "\\boxed{(1,2)}", True),
        ("\\{1, 2\\}", "\\{2, 1\\}", True),
        ("72", "", False),
        ("72", "\ud83d \x00 ½", False),
        ("72", "([{<" * 5_000, False),
        ("72", "7" * 20_000, False),
        ("72", "\\boxed{" * 1_000, False),
        ("72", "__import__('os').abort()", False),
        ("72", "answer is 9 * (7).__class__", False),
    ],
)
def test_equal_expressions_are_right(ask, answer, given, is_right):
    transition = score(ask(answer), given)
    assert (transition.reward, transition.reward_components) == (float(is_right), {"correct": float(is_right)})
    assert transition.info == {}


def test_an_answer_that_takes_too_long_scores_nothing_and_leaves_the_timers_alone(ask, monkeypatch):
    monkeypatch.setattr(qa, "MATH_TIMEOUT_S", 0.2)
    fired: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        transition = score(ask("72"), "$9^{9^{9^{9}}}$")
        remaining_s, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert transition.reward == 0
    assert transition.info == {"scorer_error": "math-verify did not end within 0.2 s"}
    assert 900 < remaining_s < 1000
    assert not fired


def test_the_limit_of_an_environment_holds_around_it(ask):
    make = LimitedEnvironments("qa", lambda: ask("72"), TimeLimit(timeout_s=100))
    held = make()
    asyncio.run(held.call("reset", held.example(0, "train")))
    assert asyncio.run(held.call("step", "72")).reward == 1


def test_it_scores_in_other_threads_too(ask):
    environment, found = ask("1/2"), []
    thread = threading.Thread(target=lambda: found.append(score(environment, "0.5").reward))
    thread.start()
    thread.join()
    assert found == [1]


def test_a_right_answer_that_cannot_be_read_fails_the_episode(ask):
    with pytest.raises(ValueError, match="math-verify can't read the right answer"):
        score(ask("\\boxed{}"), "72")


def test_it_says_nothing_of_its_own_time_limits(ask, caplog):
    score(ask("72"), "72")
    assert caplog.records == []
