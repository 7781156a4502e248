"""Intervals of a mean over examples: worked by hand, equal to scipy and statsmodels, and right as often as they say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.eval.intervals import Interval, bootstrap, clustered, t_quantile, wilson

CLUSTERS = st.lists(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=5), min_size=2, max_size=20)


def added(clusters: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([sum(values) for values in clusters]), np.array([len(values) for values in clusters])


def test_an_interval_by_hand() -> None:
    # mean 5/2, deviations -3/2, -1/2, 1/2, 3/2: variance 5/3, error sqrt(5/3/4) = 0.6455; t(0.975, 3) = 3.1824
    found = clustered(np.array([1.0, 2.0, 3.0, 4.0]), np.ones(4))
    assert found.estimate == 2.5
    assert found.std_error == pytest.approx(0.645497, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((2.5 - 2.054260, 2.5 + 2.054260), abs=1e-5)


def test_values_of_one_example_are_not_independent() -> None:
    # Both examples answer all alike: the error is that of 2 values, sqrt(1/2 / 2) = 1/2, not that of 8.
    found = clustered(np.array([0.0, 4.0]), np.array([4, 4]))
    assert (found.estimate, found.std_error) == (0.5, pytest.approx(0.5))


@pytest.mark.parametrize("interval", [clustered, bootstrap])
def test_one_example_has_a_mean_and_no_interval(interval) -> None:
    assert interval(np.array([3.0]), np.array([4])) == Interval(estimate=0.75, std_error=None, low=None, high=None)


@pytest.mark.parametrize("interval", [clustered, bootstrap, wilson])
def test_no_value_has_no_mean(interval) -> None:
    empty = np.zeros(0)
    assert interval(empty, empty) == Interval(estimate=None, std_error=None, low=None, high=None)


@pytest.mark.slow
@given(st.floats(0.51, 0.9995), st.integers(1, 100_000))
def test_quantiles_of_t_are_those_of_scipy(probability: float, df: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    assert t_quantile(probability, df) == pytest.approx(float(stats.t.ppf(probability, df)), rel=1e-7)


@pytest.mark.parametrize(("df", "wanted"), [(1, 12.7062047), (9, 2.2621572), (29, 2.0452296), (10**6, 1.9599664)])
def test_quantiles_of_t_are_those_of_tables(df: int, wanted: float) -> None:
    assert t_quantile(0.975, df) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow
@given(CLUSTERS)
def test_the_clustered_error_is_that_of_a_regression_on_a_constant(clusters: list[list[float]]) -> None:
    models = pytest.importorskip("statsmodels.api", reason="statsmodels is not installed")
    values = [value for values in clusters for value in values]
    groups = np.array([number for number, values in enumerate(clusters) for _ in values])
    fitted = models.OLS(values, np.ones(len(values))).fit(cov_type="cluster", cov_kwds={"groups": groups}, use_t=True)
    found = clustered(*added(clusters))
    assert found.std_error == pytest.approx(float(fitted.bse[0]), abs=1e-9)
    if found.std_error and found.std_error > 1e-9:
        assert (found.low, found.high) == pytest.approx(tuple(fitted.conf_int()[0]), abs=1e-6)


@given(CLUSTERS)
def test_the_clustered_error_is_the_papers(clusters: list[list[float]]) -> None:
    """Miller's equation: variance of all values, plus the products of different values of one example."""
    values = np.array([value for values in clusters for value in values])
    mean, square = values.mean(), 0.0
    for of_example in clusters:
        errors = np.array(of_example) - mean
        square += float(errors @ errors) + sum(
            errors[i] * errors[j] for i in range(len(errors)) for j in range(len(errors)) if i != j
        )
    size = len(clusters)
    wanted = math.sqrt(max(0.0, square)) / len(values) * math.sqrt(size / (size - 1))
    assert clustered(*added(clusters)).std_error == pytest.approx(wanted, abs=1e-7)


@pytest.mark.slow
@given(st.integers(1, 60), st.data())
def test_wilsons_interval_is_that_of_statsmodels(num: int, data: st.DataObject) -> None:
    proportion = pytest.importorskip("statsmodels.stats.proportion", reason="statsmodels is not installed")
    successes = data.draw(st.integers(0, num))
    found = wilson(np.array([1.0] * successes + [0.0] * (num - successes)), np.ones(num))
    assert (found.low, found.high) == pytest.approx(proportion.proportion_confint(successes, num, method="wilson"))


def test_wilsons_interval_by_hand() -> None:
    # 9 of 10: z = 1.96: (0.9 + 0.19207) / 1.38415 = 0.78898, and 1.95996 / 1.38415 * sqrt(0.009 + 0.009604) = 0.19313
    found = wilson(np.array([1.0] * 9 + [0.0]), np.ones(10))
    assert (found.low, found.high) == pytest.approx((0.59585, 0.98212), abs=1e-5)


def test_wilsons_interval_counts_equal_values_of_an_example_once() -> None:
    once = wilson(np.array([1.0, 1.0, 0.0, 1.0]), np.ones(4))
    four_times = wilson(np.array([4.0, 4.0, 0.0, 4.0]), np.full(4, 4))
    assert (four_times.low, four_times.high) == pytest.approx((once.low, once.high))


def test_a_share_of_1_has_an_interval() -> None:
    assert wilson(np.full(10, 4.0), np.full(10, 4)).low == pytest.approx(wilson(np.ones(10), np.ones(10)).low)


def test_the_bootstrap_agrees_with_the_formula_for_many_examples() -> None:
    random = np.random.default_rng(0)
    totals, counts = random.normal(size=400), random.integers(1, 5, size=400)
    formula, resampled = clustered(totals, counts), bootstrap(totals, counts)
    assert resampled.std_error == pytest.approx(formula.std_error, rel=0.05)
    assert (resampled.low, resampled.high) == pytest.approx((formula.low, formula.high), abs=0.2 * formula.std_error)


def test_the_bootstrap_is_the_same_for_a_seed() -> None:
    totals, counts = np.arange(9.0), np.ones(9)
    assert bootstrap(totals, counts, seed=1) == bootstrap(totals, counts, seed=1)
    assert bootstrap(totals, counts, seed=1) != bootstrap(totals, counts, seed=2)


def covers(interval: Interval, truth: float) -> bool:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= truth <= interval.high


def test_clustered_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Each example has its own difficulty, so its four samples depend on each other: naive intervals hold it in 70%."""
    random = np.random.default_rng(1)
    chances = random.beta(0.5, 0.5, size=(2000, 100))
    totals = random.binomial(4, chances).astype(float)
    counts = np.full(100, 4)
    for interval in (clustered, wilson):
        share = np.mean([covers(interval(row, counts), 0.5) for row in totals])
        assert 0.93 <= share <= 0.97, (interval, share)
    naive = np.sqrt(totals.mean(1) / 4 * (1 - totals.mean(1) / 4) / 400) * 1.96
    assert np.mean(np.abs(totals.mean(1) / 4 - 0.5) <= naive) < 0.8


@pytest.mark.slow
def test_bootstrap_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(2)
    totals = random.binomial(4, random.beta(0.5, 0.5, size=(300, 100))).astype(float)
    share = np.mean([covers(bootstrap(row, np.full(100, 4)), 0.5) for row in totals])
    assert 0.92 <= share <= 0.98  # of 300 tables: an error of 1.3%


def test_paired_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Both sides find the same examples hard, so differences vary less than the sides do."""
    random = np.random.default_rng(3)
    hard = random.beta(0.5, 0.5, size=(2000, 100)) * 0.9
    a, b = random.binomial(4, hard) / 4, random.binomial(4, hard + 0.1) / 4
    share = np.mean([covers(clustered(row, np.ones(100)), 0.1) for row in b - a])
    assert 0.93 <= share <= 0.97
