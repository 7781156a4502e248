"""Intervals of a mean over examples: worked by hand, equal to scipy and statsmodels, and right as often as they say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.eval.statistics import Interval, beta_quantile, clustered, equal_differences, korn_graubard, t_quantile

CLUSTERS = st.lists(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=5), min_size=5, max_size=20)


def means_of(clusters: list[list[float]]) -> np.ndarray:
    return np.array([sum(values) / len(values) for values in clusters])


def test_an_interval_by_hand() -> None:
    # mean 3, deviations -2 to 2: variance 10/4, error sqrt(5/2/5) = 0.7071; t(0.975, 4) = 2.77645
    found = clustered(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert found.estimate == 3.0
    assert found.std_error == pytest.approx(0.707107, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((3 - 1.963243, 3 + 1.963243), abs=1e-5)


def test_too_few_examples_have_no_interval_by_their_spread() -> None:
    assert clustered(np.array([1.0, 2.0, 3.0, 4.0])) == Interval(estimate=2.5)
    assert clustered(np.array([1.0, 2.0, 3.0, 4.0, 5.0])).low is not None


def test_one_example_has_a_mean_and_no_interval() -> None:
    assert clustered(np.array([0.75])) == Interval(estimate=0.75, std_error=None, low=None, high=None)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e9])
def test_equal_examples_have_a_mean_and_no_interval(value: float) -> None:
    assert clustered(np.full(6, value)) == Interval(estimate=pytest.approx(value))


@pytest.mark.parametrize("interval", [clustered, korn_graubard])
def test_no_value_has_no_mean(interval) -> None:
    assert interval(np.zeros(0)) == Interval(estimate=None, std_error=None, low=None, high=None)


@pytest.mark.slow
@given(st.floats(0.51, 0.9995), st.integers(1, 100_000))
def test_quantiles_of_t_are_those_of_scipy(probability: float, df: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    assert t_quantile(probability, df) == pytest.approx(float(stats.t.ppf(probability, df)), rel=1e-7)


@pytest.mark.parametrize(("df", "wanted"), [(1, 12.7062047), (9, 2.2621572), (29, 2.0452296), (10**6, 1.9599664)])
def test_quantiles_of_t_are_those_of_tables(df: int, wanted: float) -> None:
    assert t_quantile(0.975, df) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("totals", "num", "trials", "successes"),
    [
        # One value an example: Clopper and Pearson's interval of 9 of 10, and of 0 of 10.
        ([1] * 9 + [0], 1, 10, 9),
        ([0] * 10, 1, 10, 0),
        # All examples agree: as many trials as examples, not as values.
        ([0] * 10, 16, 10, 0),
        ([4] * 5, 4, 5, 5),
        ([8] * 5, 16, 5, 2.5),
        ([16], 16, 1, 1),
        # Mean 5/8. Deviations 3/8, 3/8, -5/8, -1/8, squares 0.6875, error**2 0.6875 / 12: 15/64 / 0.0573 = 4.1 trials;
        # t has 3 degrees of freedom: times (1.95996 / 3.18245)**2 = 0.37930 are 1.6, less than 4 examples.
        ([2, 2, 0, 1], 2, 4, 2.5),
        # Mean 1/2. Deviations -1/8, 0, 1/8, 0, squares 1/32, error**2 1/384: 96 trials; kurtosis 2, so that
        # 8 / (2 - 1/3) is more than 3 degrees of freedom: times 0.3792954 are 36, more than 4**2 / 4.
        ([6, 8, 10, 8], 16, 4, 2),
        # Mean 1/2, of 8 examples. Deviations of 1/8 in four, squares 1/16, error**2 1/896: 224 trials; kurtosis 2, so
        # that 16 / (2 - 5/7) is more than 7 degrees of freedom: times (1.95996 / 2.36462)**2 are 154, above 8**2 / 4
        ([6, 8, 10, 8, 6, 8, 10, 8], 16, 16, 8),
        # One of ten examples has 3 of 16. Mean 3/160; 9 equal deviations of -3/160 and one of 27/160, squares
        # 81/2560, error**2 9/25600: (3/160)(157/160) / that = 52.3333. Kurtosis 10 (9 + 9**4) / 90**2 = 73/9;
        # 20 / (73/9 - 7/9) = 30/11 degrees of freedom, t 3.37036: times (1.95996 / 3.37036)**2 are 17.698
        ([3] + [0] * 9, 16, 17.698, 17.698 * 3 / 160),
    ],
)
def test_korn_and_graubards_interval_by_hand(totals: list[int], num: int, trials: float, successes: float) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    found = korn_graubard(np.array(totals) / num, trials=np.full(len(totals), num))
    low = stats.beta.ppf(0.025, successes, trials - successes + 1) if successes else 0.0
    high = stats.beta.ppf(0.975, successes + 1, trials - successes) if trials - successes else 1.0
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-5)


def test_korn_and_graubards_interval_of_a_share_of_0_by_hand() -> None:
    # Clopper and Pearson: 0.025 = (1 - high)**40
    found = korn_graubard(np.zeros(40))
    assert (found.estimate, found.std_error, found.low) == (0.0, None, 0.0)
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 40))


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(1, 16)), min_size=1, max_size=12), st.booleans())
def test_korn_and_graubards_interval_is_between_0_and_1_and_holds_its_mean(
    examples: list[tuple[int, int]], of_more_trials: bool
) -> None:
    totals, counts = (np.array(column, dtype=float) for column in zip(*examples, strict=True))
    means, trials = np.minimum(totals, counts) / counts, counts if of_more_trials else None
    found = korn_graubard(means, trials=trials)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    assert found.high - found.low > 0.005
    mirrored = korn_graubard(1 - means, trials=trials)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low), abs=1e-9)


def test_more_trials_than_examples_make_the_interval_of_pass_at_k_narrower() -> None:
    values = np.array([0.4, 0.5, 0.6, 0.5, 0.4, 0.6])
    found = [korn_graubard(np.tile(values, 3), trials=np.full(18, num)) for num in (1, 4)]
    assert found[1].high - found[1].low < 0.7 * (found[0].high - found[0].low)


def test_uneven_trials_are_worth_as_many_as_their_harmonic_mean() -> None:
    # Nearly equal examples: 20 examples of 4 trials are 80. Half of 16 and half of 16/7 are worth as many: 20**2 / 5.
    means = np.tile([0.5, 0.51], 10)
    even, uneven = (korn_graubard(means, trials=np.tile(trials, 10)) for trials in ([4, 4], [16, 16 / 7]))
    assert (uneven.low, uneven.high) == pytest.approx((even.low, even.high))
    wanted = korn_graubard(np.array([0.0, 1.0] * 40)[:80])
    assert even.high - even.low == pytest.approx(wanted.high - wanted.low, rel=0.01)


def test_equal_differences_by_hand() -> None:
    # Of 10 equal pairs: at most 1 - 0.05**(1/10) = 0.25887 of all pairs differ, from -1 to 1
    found = equal_differences(0.0, 10)
    assert (found.low, found.high) == pytest.approx((-0.258866, 0.258866), abs=1e-6)
    # All gained: at least 0.74113 of all pairs gain, and at most 0.25887 lose
    found = equal_differences(1.0, 10)
    assert (found.low, found.high) == pytest.approx((0.482269, 1.0), abs=1e-6)


@pytest.mark.parametrize("probability", [0.001, 0.025, 0.5, 0.95, 0.999])
def test_quantiles_of_beta_are_those_of_scipy(probability: float) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    for a in (0.05, 0.5, 1.0, 3.3, 40.0, 5000.0):
        for b in (1.0, 2.5, 17.0, 800.0, 1e6):
            wanted = float(stats.beta.ppf(probability, a, b))
            assert beta_quantile(probability, a, b) == pytest.approx(wanted, rel=1e-7, abs=1e-50), (a, b)


@pytest.mark.slow
@given(CLUSTERS)
def test_the_clustered_error_is_that_of_a_regression_on_a_constant(clusters: list[list[float]]) -> None:
    """Each value weighs so that its example counts once."""
    models = pytest.importorskip("statsmodels.api", reason="statsmodels is not installed")
    values = [value for values in clusters for value in values]
    groups = np.array([number for number, values in enumerate(clusters) for _ in values])
    weights = np.array([1 / len(values) for values in clusters for _ in values])
    model = models.WLS(values, np.ones(len(values)), weights=weights)
    options = {"groups": groups, "use_correction": False}
    fitted = model.fit(cov_type="cluster", cov_kwds=options, use_t=True)
    found, size = clustered(means_of(clusters)), len(clusters)
    assert found.estimate == pytest.approx(float(fitted.params[0]))
    wanted = float(fitted.bse[0]) * math.sqrt(size / (size - 1))
    assert (found.std_error or 0.0) == pytest.approx(wanted, abs=1e-9)


def covers(interval: Interval, truth: float) -> bool:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= truth <= interval.high


def test_clustered_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Each example has its own difficulty, so its four samples depend on each other: naive intervals hold it in 70%."""
    random = np.random.default_rng(1)
    chances = random.beta(0.5, 0.5, size=(2000, 100))
    totals = random.binomial(4, chances).astype(float)
    share = np.mean([covers(clustered(row), 0.5) for row in totals / 4])
    assert 0.93 <= share <= 0.97
    naive = np.sqrt(totals.mean(1) / 4 * (1 - totals.mean(1) / 4) / 400) * 1.96
    assert np.mean(np.abs(totals.mean(1) / 4 - 0.5) <= naive) < 0.8


@pytest.mark.parametrize(
    ("a", "b", "num_examples", "num"),
    [(0.2, 3.8, 5, 1), (0.2, 3.8, 10, 16), (9.5, 0.5, 20, 1), (0.1, 9.9, 10, 4), (0.1, 9.9, 50, 16), (1, 1, 5, 16)],
)
def test_intervals_of_shares_near_0_and_1_hold_the_truth(a: float, b: float, num_examples: int, num: int) -> None:
    """A few cells of benchmarks/intervals.py, where clustered intervals hold it in 0.28 to 0.93."""
    random = np.random.default_rng(4)
    totals = random.binomial(num, random.beta(a, b, size=(300, num_examples))).astype(float)
    trials = np.full(num_examples, num)
    assert np.mean([covers(korn_graubard(row, trials=trials), a / (a + b)) for row in totals / num]) >= 0.93


@pytest.mark.parametrize("num_examples", [3, 4, 5, 8, 10])
@pytest.mark.parametrize("hard", [0.5, 0.8])
@pytest.mark.parametrize("trials", [[16], [1, 16]])
def test_few_examples_of_two_kinds_hold_the_truth(num_examples: int, hard: float, trials: list[int]) -> None:
    """Chances of 0.1 or 0.9: all examples may be of one kind, and then agree about a wrong value."""
    random, counts = np.random.default_rng(5), np.resize(trials, num_examples)
    chances = np.where(random.random((300, num_examples)) < hard, 0.1, 0.9)
    truth = 0.9 - 0.8 * hard
    share = np.mean(
        [covers(korn_graubard(row, trials=counts), truth) for row in random.binomial(counts, chances) / counts]
    )
    assert share >= 0.92  # of 300 draws: an error of 1.3%


def test_paired_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Both sides find the same examples hard, so differences vary less than the sides do."""
    random = np.random.default_rng(3)
    hard = random.beta(0.5, 0.5, size=(2000, 100)) * 0.9
    a, b = random.binomial(4, hard) / 4, random.binomial(4, hard + 0.1) / 4
    share = np.mean([covers(clustered(row), 0.1) for row in b - a])
    assert 0.93 <= share <= 0.97
