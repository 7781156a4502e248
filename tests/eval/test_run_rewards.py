"""Training rewards of runs at equal steps and tokens, worked by hand and against SciPy."""

from pathlib import Path

import numpy as np
import pytest
from compared_runs import Groups, make_compared, train_on
from scipy import stats

from ludic.eval.run_rewards import common_amounts, read_progress, read_rewards, reward_columns
from ludic.eval.statistics import clustered, welch
from ludic.root.sql import connect

LOW: Groups = ((0.0, 1.0), (0.0, 0.0))
HIGH: Groups = ((1.0, 1.0), (1.0, 0.0), (None, 1.0), (None, None))


def test_welch_and_students_intervals_are_those_of_scipy() -> None:
    random = np.random.default_rng(3)
    first, other = random.normal(size=7), random.normal(1, 3, size=12)
    found = welch(first, other, 0.9)
    wanted = stats.ttest_ind(other, first, equal_var=False).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert found.estimate == pytest.approx(other.mean() - first.mean())
    two = clustered(np.array([1.0, 3.0]), fewest=2)
    # mean 2, error 1, t(0.975, 1) = 12.7062
    assert (two.low, two.high) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)


def test_equal_values_and_few_values_have_no_interval_of_a_difference() -> None:
    ones, zeros = np.ones(9), np.zeros(9)
    assert (welch(zeros, ones).estimate, welch(zeros, ones).low) == (1.0, None)
    assert welch(np.arange(4.0), np.arange(9.0)).low is None
    assert welch(np.empty(0), ones).estimate is None


def test_a_resumed_run_is_one_curve_and_is_cut_where_all_runs_have_been(tmp_path: Path) -> None:
    root = make_compared(str(tmp_path / "a"), {1: LOW, 2: LOW, 3: LOW}, tokens=10)
    train_on(root, {3: HIGH, 4: HIGH, 5: HIGH}, tokens=20, parent=(1, 2))  # step 3 of the first attempt is replaced
    con = connect(root)
    run = read_progress(con, root)
    # four rollouts of 5 + 10 tokens a step, then five of 5 + 20 that are used, of six
    assert run.steps.tolist() == [1, 2, 3, 4, 5]
    assert run.tokens.tolist() == [60, 120, 245, 370, 495]
    other = make_compared(str(tmp_path / "b"), {1: HIGH, 2: HIGH, 3: HIGH, 4: HIGH}, tokens=45)
    fast = read_progress(connect(other), other)
    none = make_compared(str(tmp_path / "c"), {})
    empty = read_progress(connect(none), none)
    assert common_amounts([run, fast, empty]) == {"step": 4, "tokens": 495}
    assert (empty.last_step, empty.num_tokens) == (None, 0)
    # 250 tokens a step: one step is within 495
    assert (fast.window_at("tokens", 495), fast.window_at("tokens", 249)) == ((1, 1), None)
    assert (run.window_at("tokens", 494), run.window_at("step", 4, 3)) == ((1, 4), (2, 4))
    values = read_rewards(con, root, (2, 4))
    # groups of step 2: 0.5 and 0; of 3 and 4: 1, 0.5, and 1 without the rollout that is not scored
    assert sorted(values) == [0.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert len(read_rewards(con, root, (2, 4), ["other"])) == 0


def test_between_runs_the_unit_is_the_run() -> None:
    baseline, values = np.array([0.1, 0.2]), np.array([0.4, 0.6, 0.8])
    found = reward_columns(baseline, values, 0.95, fewest=2)
    # mean 0.6, variance 0.04, t(0.975, 2) = 4.30265
    margin = 4.30265 * 0.2 / 3**0.5
    assert (found["low"], found["high"]) == pytest.approx((0.6 - margin, 0.6 + margin), abs=1e-5)
    wanted = stats.ttest_ind(values, baseline, equal_var=False).confidence_interval(0.95)
    assert (found["difference_low"], found["difference_high"]) == pytest.approx((wanted.low, wanted.high))
    assert reward_columns(None, values, 0.95)["difference"] is None
