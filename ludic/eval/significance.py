"""Tests of a difference between two policies on the same examples, their power, and Holm's correction. Only NumPy."""

# Shapes: G = examples that both sides have. differences: (G,) float64, mean of B's values minus mean of A's.

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

EXACT_UP_TO = 16
"""Differences that are not 0, up to which all signs are tried: 65,536 ways."""
_NUM_FLIPS = 10_000
_FLIPS_AT_ONCE = 500
_TIE = 1e-9
"""Relative difference of sums that count as equal; they are added in different orders."""
_POWER = 0.8


def mcnemar(num_gains: int, num_losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: gains among the examples that changed are a fair coin."""
    num = num_gains + num_losses
    tail, ways = 0, 1
    for count in range(min(num_gains, num_losses) + 1):
        tail += ways
        ways = ways * (num - count) // (count + 1)  # C(num, count + 1)
    return min(1.0, (2 * tail) / (1 << num))  # Python divides integers of any size exactly, then rounds


def permutation(differences: np.ndarray, *, seed: int = 0) -> float:
    """Return the two-sided p-value of the mean difference if each example's sign were a fair coin.

    Exact for up to EXACT_UP_TO differences that are not 0; else by 10,000 drawn signs, (b + 1) / (m + 1), which is
    never 0.
    """
    changed = differences[differences != 0]
    if not len(changed):
        return 1.0
    limit = abs(changed.sum()) - _TIE * np.abs(changed).sum()
    if len(changed) <= EXACT_UP_TO:
        signs = 1 - 2 * ((np.arange(1 << len(changed))[:, None] >> np.arange(len(changed))) & 1)
        return float(np.mean(np.abs(signs @ changed) >= limit))
    random, num_extreme = np.random.default_rng(seed), 0
    for _ in range(_NUM_FLIPS // _FLIPS_AT_ONCE):
        signs = 1 - 2 * random.integers(0, 2, size=(_FLIPS_AT_ONCE, len(changed)))
        num_extreme += int(np.sum(np.abs(signs @ changed) >= limit))
    return (num_extreme + 1) / (_NUM_FLIPS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method, in their order."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def power(std_error: float, difference: float, confidence: float = 0.95) -> float:
    """Return the probability that a true difference is found, by the normal approximation of a two-sided test."""
    normal = NormalDist()
    if std_error == 0:
        return 1.0
    limit, shift = normal.inv_cdf(0.5 + confidence / 2), abs(difference) / std_error
    return normal.cdf(shift - limit) + normal.cdf(-shift - limit)


def examples_needed(std_error: float, num_examples: int, difference: float, confidence: float = 0.95) -> int:
    """Return the number of examples with which a true difference is found with a probability of 0.8.

    std_error: of the mean difference over num_examples examples; it falls with the root of their number.
    """
    normal = NormalDist()
    wanted = abs(difference) / (normal.inv_cdf(0.5 + confidence / 2) + normal.inv_cdf(_POWER))
    return max(2, math.ceil(num_examples * (std_error / wanted) ** 2))
