"""Tests of a difference: worked by hand, equal to scipy and statsmodels."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.eval.significance import examples_needed, holm, mcnemar, permutation, power


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


@pytest.mark.slow
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_that_of_statsmodels(p_values: list[float]) -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest", reason="statsmodels is not installed")
    assert holm(p_values) == pytest.approx(list(multitest.multipletests(p_values, method="holm")[1]))


def test_power_by_hand() -> None:
    # A difference of 2.8016 errors is found with 80% at 95% confidence (1.95996 + 0.84162).
    assert power(0.1, 0.280158) == pytest.approx(0.8, abs=1e-4)
    assert power(0.1, 1e-12) == pytest.approx(0.05)
    assert power(0.0, 0.1) == 1.0


def test_with_the_examples_needed_the_power_is_reached() -> None:
    num = examples_needed(0.05, 100, 0.1)
    assert power(0.05 * (100 / num) ** 0.5, 0.1) >= 0.8
    assert power(0.05 * (100 / (num - 1)) ** 0.5, 0.1) < 0.8
    assert examples_needed(0.0, 100, 0.1) == 2


@pytest.mark.slow
@settings(max_examples=20)
@given(st.floats(0.02, 0.2), st.floats(0.05, 0.5))
def test_power_is_that_of_statsmodels(error: float, difference: float) -> None:
    powers = pytest.importorskip("statsmodels.stats.power", reason="statsmodels is not installed")
    num = 64
    wanted = powers.normal_power(difference / (error * num**0.5), num, 0.05)
    assert power(error, difference) == pytest.approx(float(wanted), abs=1e-9)
