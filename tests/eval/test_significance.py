"""Tests of a difference: worked by hand, equal to scipy and statsmodels."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.eval.statistics import (
    FEWEST_FOR_POWER,
    _mcnemar_power,
    fewest_pairs,
    holm,
    mcnemar,
    mcnemar_mid_p,
    permutation,
    power,
)


def test_mcnemar_by_hand() -> None:
    # 8 gains, 1 loss: 2 (1 + 9) / 2**9
    assert mcnemar(8, 1) == pytest.approx(20 / 512)
    assert mcnemar(1, 8) == mcnemar(8, 1)
    assert (mcnemar(0, 0), mcnemar(3, 3)) == (1.0, 1.0)


@pytest.mark.slow
@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_that_of_statsmodels(gains: int, losses: int) -> None:
    tables = pytest.importorskip("statsmodels.stats.contingency_tables", reason="statsmodels is not installed")
    wanted = tables.mcnemar([[5, losses], [gains, 5]], exact=True).pvalue
    assert mcnemar(gains, losses) == pytest.approx(min(1.0, float(wanted)), rel=1e-9)


@pytest.mark.slow
def test_mcnemar_of_thousands_of_examples() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    assert mcnemar(5200, 4800) == pytest.approx(stats.binomtest(4800, 10_000).pvalue, rel=1e-9)


def test_a_permutation_by_hand() -> None:
    # 1 + 2 + 3 = 6: only all signs, or none, reach it: 2 of 8. With 1, 2, -3 every way reaches 0.
    assert permutation(np.array([1.0, 2.0, 3.0])) == 0.25
    assert permutation(np.array([1.0, 2.0, -3.0])) == 1.0
    assert permutation(np.array([0.0, 1.0, 2.0, 3.0, 0.0])) == 0.25
    assert permutation(np.zeros(4)) == 1.0


@settings(max_examples=30)
@given(st.lists(st.integers(-4, 4).map(lambda value: value / 3), min_size=1, max_size=9))
def test_few_examples_are_exact(differences: list[float]) -> None:
    sums = [abs(sum(np.multiply(signs, differences))) for signs in product([-1, 1], repeat=len(differences))]
    wanted = np.mean([each >= abs(sum(differences)) - 1e-9 for each in sums])
    assert permutation(np.array(differences)) == pytest.approx(float(wanted))


@pytest.mark.slow
def test_a_permutation_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    differences = np.random.default_rng(0).normal(0.4, 1, size=14)
    found = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert permutation(differences) == pytest.approx(found.pvalue)


@pytest.mark.slow
def test_many_examples_are_drawn_alike_for_a_seed() -> None:
    differences = np.random.default_rng(0).normal(0.2, 1, size=200)
    first = permutation(differences, seed=1)
    assert first == permutation(differences, seed=1)
    # The normal approximation of the same test.
    shift = abs(differences.sum()) / np.sqrt(np.sum(differences**2))
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    assert first == pytest.approx(2 * stats.norm.sf(shift), abs=0.01)


def test_permutation_p_values_are_uniform_without_a_difference() -> None:
    random = np.random.default_rng(5)
    found = [permutation(random.choice([-0.5, 0, 0.25, 1], size=12) * random.choice([-1, 1], 12)) for _ in range(400)]
    assert np.mean(np.array(found) <= 0.05) <= 0.07


def test_holm_by_hand() -> None:
    # sorted .01, .03, .04: times 3, 2, 1, and never below the one before
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_mid_p_by_hand() -> None:
    # 8 gains, 1 loss: the exact 20 / 512, less 9 / 512, the probability of just this
    assert mcnemar_mid_p(8, 1) == mcnemar_mid_p(1, 8) == pytest.approx(11 / 512)
    # 3 and 3: 1 less half of C(6, 3) / 2**6
    assert mcnemar_mid_p(3, 3) == pytest.approx(1 - 20 / 128)
    assert mcnemar_mid_p(0, 0) == 1.0


@pytest.mark.parametrize(("gains", "losses"), [(5, 0), (9, 2), (2, 9), (40, 21)])
def test_mid_p_is_that_of_the_binomial_distribution(gains: int, losses: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    coin = stats.binom(gains + losses, 0.5)
    assert mcnemar_mid_p(gains, losses) == pytest.approx(2 * coin.cdf(min(gains, losses)) - coin.pmf(gains))


@pytest.mark.parametrize(("confidence", "wanted"), [(0.95, 6), (0.99, 8), (0.9, 5), (0.5, 2), (1 - 2 / 32, 5)])
def test_the_fewest_pairs_that_can_be_significant(confidence: float, wanted: int) -> None:
    assert fewest_pairs(confidence) == wanted
    assert mcnemar(wanted, 0) <= 1 - confidence + 1e-9
    assert mcnemar(wanted - 1, 0) > 1 - confidence


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("differences", [[1.0, 1.0, 1.0, 1.0, 0.0], [0.0] * 5, [1.0, -1.0], [1.0]])
def test_too_few_pairs_find_nothing(differences: list[float], is_binary: bool) -> None:
    assert power(np.array(differences), 0.3, is_binary=is_binary).power == 0.0


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_the_power_of_equal_pairs_is_not_known(value: float, is_binary: bool) -> None:
    found = power(np.full(40, value), 0.05, is_binary=is_binary)
    assert (found.power, found.examples_needed) == (None, None)


def test_the_power_of_mcnemars_test_by_hand() -> None:
    # Of 6 pairs only 6 gains, or 6 losses, are significant; of 7 pairs 6 or 7 gains.
    assert _mcnemar_power(6, 0.5, 0.0, 0.05) == pytest.approx(1 / 64)
    assert _mcnemar_power(7, 0.5, 0.0, 0.05) == pytest.approx(8 / 128)
    # Two gains, 18 equal: tilted to a mean of 1/2, each gains with a chance of 1/2. 6 gains or more: 1 - 21700 / 2**20.
    differences = np.array([1.0] * 2 + [0.0] * 18)
    wanted = 1 - (1 + 20 + 190 + 1140 + 4845 + 15504) / 2**20
    assert power(differences, 0.5, is_binary=True).power == pytest.approx(wanted)
    assert power(-differences, -0.5, is_binary=True).power == pytest.approx(wanted)
    # If all gain, all is certain.
    assert power(differences, 1.0, is_binary=True).power == pytest.approx(1.0)


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("num_pairs", [5, 6, 10, FEWEST_FOR_POWER - 1, FEWEST_FOR_POWER])
def test_power_of_few_pairs_is_not_estimated(num_pairs: int, is_binary: bool) -> None:
    found = power(np.resize([1.0, 0.0, 0.0], num_pairs), 0.5, is_binary=is_binary)
    assert (found.power == 0.0) == (num_pairs < 6)
    assert (found.power is None) == (6 <= num_pairs < FEWEST_FOR_POWER)
    assert found.examples_needed is not None


def test_examples_needed_by_hand() -> None:
    # Chances of 1/4 to gain and none to lose: ((1.95996 * 0.5 + 0.84162 * sqrt(3) / 4) / 0.25)**2 = 28.9 (Connor)
    differences = np.array([1.0] * 5 + [0.0] * 15)
    assert power(differences, 0.25, is_binary=True).examples_needed == 29
    # A difference that every pair has needs as many pairs as the test: 6.
    assert power(np.array([1.0] * 8 + [0.0] * 2), 1.0, is_binary=True).examples_needed == 6


@pytest.mark.parametrize(("num_pairs", "share"), [(20, 0.5), (30, 0.6), (256, 0.1)])
def test_the_power_of_mcnemars_test_is_how_often_it_is_significant(num_pairs: int, share: float) -> None:
    """Drawn from the model itself: gains in `share` of the pairs, losses in a fourth of it."""
    gains = round(share * num_pairs)
    losses = gains // 4
    differences = np.array([1.0] * gains + [-1.0] * losses + [0.0] * (num_pairs - gains - losses))
    found = power(differences, float(differences.mean()), is_binary=True).power
    chances = np.array([gains, losses, num_pairs - gains - losses]) / num_pairs
    drawn = np.random.default_rng(0).multinomial(num_pairs, chances, size=3000)
    wanted = np.mean([mcnemar(int(up), int(down)) <= 0.05 for up, down, _ in drawn])
    assert found == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize("num_pairs", [40, 300])
def test_the_power_of_the_permutation_test_is_nearly_that_of_a_t_test(num_pairs: int) -> None:
    powers = pytest.importorskip("statsmodels.stats.power", reason="statsmodels is not installed")
    differences = np.random.default_rng(1).normal(0.3, 1, size=num_pairs)
    differences = (differences - differences.mean()) / differences.std(ddof=1) + 0.3
    for wanted in (0.15, 0.3, 0.45):
        found = power(differences, wanted, is_binary=False).power
        assert found == pytest.approx(powers.TTestPower().power(wanted, num_pairs, 0.05), abs=0.07), wanted


@pytest.mark.parametrize(
    ("num", "num_pairs", "start", "change"),
    [(1, 5, 0.35, 0.3), (4, 6, 0.35, 0.3), (1, 10, 0.35, 0.3), (1, 20, 0.35, 0.3), (4, 20, 0.02, 0.05)],
)
def test_reported_power_is_not_above_true_power(num: int, num_pairs: int, start: float, change: float) -> None:
    """Some cells of benchmarks/intervals.py: the normal approximation of the mean's error says 0.2 to 0.4 too much."""
    random = np.random.default_rng(6)
    a, b = (random.binomial(num, each, size=(60, num_pairs)) / num for each in (start, start + change))
    rows = b - a
    found = [power(row, change, is_binary=num == 1).power for row in rows]
    true = np.mean(
        [
            (mcnemar(int(np.sum(row > 0)), int(np.sum(row < 0))) if num == 1 else permutation(row)) <= 0.05
            for row in rows
        ]
    )
    shown = [each for each in found if each is not None]
    assert bool(shown) == (num_pairs < 6 or num_pairs >= FEWEST_FOR_POWER)
    assert not shown or np.mean(shown) <= true + 0.1
