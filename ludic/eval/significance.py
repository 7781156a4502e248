"""Tests of a difference between two policies on the same examples, their power, and Holm's correction. Only NumPy.

Power is that of the test that is used: McNemar's exact test, or the permutation test.
"""

# Shapes: G = examples that both sides have. differences: (G,) float64, mean of B's values minus mean of A's.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

EXACT_UP_TO = 16
"""Differences that are not 0, up to which all signs are tried: 65,536 ways."""
_NUM_FLIPS = 10_000
_FLIPS_AT_ONCE = 500
_TIE = 1e-9
"""Relative difference of sums that count as equal; they are added in different orders."""
_POWER = 0.8
_MOST_PAIRS = 256
"""Pairs up to which the power is that of the test itself; beyond, that of its normal approximation."""
_EXACT_POWER_UP_TO = 12
_NUM_POWER_FLIPS = 2_000
_NUM_DRAWS = 400
"""Drawn comparisons of the permutation test's power: its error is at most 0.025."""


def mcnemar(num_gains: int, num_losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: gains among the examples that changed are a fair coin."""
    num = num_gains + num_losses
    tail, ways = 0, 1
    for count in range(min(num_gains, num_losses) + 1):
        tail += ways
        ways = ways * (num - count) // (count + 1)  # C(num, count + 1)
    return min(1.0, (2 * tail) / (1 << num))  # Python divides integers of any size exactly, then rounds


def mcnemar_mid_p(num_gains: int, num_losses: int) -> float:
    """Return the two-sided mid-p-value of McNemar's test: half the probability of what was found is left out.

    The exact test finds too little; this one hardly ever exceeds its level (Fagerland, Lydersen, Laake 2013, "The
    McNemar test for binary matched-pairs data", BMC Medical Research Methodology 13:91).
    """
    num = num_gains + num_losses
    if not num:
        return 1.0
    found = math.comb(num, num_gains) / (1 << num)
    return mcnemar(num_gains, num_losses) - found if num_gains != num_losses else 1 - found / 2


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


def fewest_pairs(confidence: float = 0.95) -> int:
    """Return the fewest pairs with which either test can be significant: all change alike, and p is 2 / 2**pairs."""
    return math.ceil(1 - math.log2(1 - confidence) - _TIE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What a comparison could find. None: it cannot be estimated."""

    power: float | None
    """Probability that a true difference is found by the test that is used."""
    examples_needed: int | None
    """Examples that find it with a probability of 0.8."""


def power(
    differences: np.ndarray, difference: float, confidence: float = 0.95, *, is_binary: bool, seed: int = 0
) -> Power:
    """Return the power for a true difference, and the examples needed, from differences that were observed.

    is_binary: the differences are -1, 0 or 1, and the test is McNemar's; else it is the permutation test.

    The examples of such a true difference are modelled by exponential tilting: the observed differences, with weights
    of exp(a times the difference) that give the wanted mean in the direction of the observed one (Efron 1981,
    "Nonparametric standard errors and confidence intervals", Canadian Journal of Statistics 9, section 11). McNemar's
    power is the sum over all numbers of gains and losses; that of the permutation test is counted in comparisons that
    are drawn. Above 256 pairs both follow the normal approximation, as does the number of examples (Connor 1987,
    "Sample size for testing differences in proportions for the paired-sample design", Biometrics 43).

    Power is 0 for fewer than `fewest_pairs`. Otherwise neither figure can be estimated if no example differs by as much
    as the wanted difference, or if all differ alike.
    """
    size, too_few = len(differences), len(differences) < fewest_pairs(confidence)
    wanted = abs(difference)
    values, chances = _tilted(differences, wanted)
    if chances is None:
        return Power(power=0.0 if too_few else None, examples_needed=None)
    square = float(chances @ values**2)
    if too_few:
        found = 0.0
    elif size > _MOST_PAIRS:
        found = _normal_power(size, wanted, square, confidence)
    elif is_binary:
        gain, loss = (float(chances[values == sign].sum()) for sign in (1, -1))
        found = _mcnemar_power(size, gain, loss, 1 - confidence)
    else:
        found = _permutation_power(size, values, chances, 1 - confidence, seed)
    needed = _examples_needed(wanted, square, confidence)
    needed = min(needed, size) if found >= _POWER else max(needed, size + 1)
    return Power(power=found, examples_needed=needed)


def _tilted(differences: np.ndarray, wanted: float) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the distinct differences, in the direction of their mean, and chances with the wanted mean; None if none.

    The chances grow by exp(factor * value / scale) with a factor that is found by bisection.
    """
    values, counts = np.unique(differences if differences.mean() >= 0 else -differences, return_counts=True)
    if not values[0] < wanted <= values[-1]:
        return values, None
    scaled, low, high = values / max(abs(values[0]), abs(values[-1])), -1000.0, 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        logs = np.log(counts) + middle * scaled
        chances = np.exp(logs - logs.max())
        chances /= chances.sum()
        low, high = (middle, high) if chances @ values < wanted else (low, middle)
    return values, chances


def _mcnemar_power(num_pairs: int, gain: float, loss: float, level: float) -> float:
    """Return the probability that McNemar's exact test is significant. gain, loss: chances of a pair to be one."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, num_pairs + 1)))])  # of factorials
    found, changing = 0.0, gain + loss

    def chances(num: int, share: float) -> np.ndarray:
        """Return the probabilities of 0, 1, ... num successes."""
        if share >= 1:
            return np.concatenate([np.zeros(num), [1.0]])
        counts = np.arange(num + 1)
        ways = logs[num] - logs[: num + 1] - logs[num::-1]
        return np.exp(ways + counts * math.log(share) + (num - counts) * math.log1p(-share)) if share else 0.0**counts

    for num, chance in enumerate(chances(num_pairs, changing)):
        tail = np.cumsum(chances(num, 0.5))
        most = int(np.sum(2 * tail <= level + _TIE))  # fewer gains than this, or fewer losses, are significant
        if most:
            gains = chances(num, gain / changing)
            found += float(chance) * float(gains[:most].sum() + gains[num + 1 - most :].sum())
    return min(1.0, found)


def _permutation_power(num_pairs: int, values: np.ndarray, chances: np.ndarray, level: float, seed: int) -> float:
    """Return the share of drawn comparisons in which the permutation test is significant."""
    random = np.random.default_rng(seed)
    drawn = random.choice(values, size=(num_pairs, _NUM_DRAWS), p=chances)
    if is_exact := num_pairs <= _EXACT_POWER_UP_TO:
        signs = 1 - 2 * ((np.arange(1 << num_pairs)[:, None] >> np.arange(num_pairs)) & 1)
    else:
        signs = 1 - 2 * random.integers(0, 2, size=(_NUM_POWER_FLIPS, num_pairs))
    limits = np.abs(drawn.sum(0)) - _TIE * np.abs(drawn).sum(0)
    num_extreme = np.sum(np.abs(signs.astype(float) @ drawn) >= limits, axis=0)
    p_values = num_extreme / len(signs) if is_exact else (num_extreme + 1) / (len(signs) + 1)
    return float(np.mean(p_values <= level + _TIE))


def _normal_power(num_pairs: int, difference: float, square: float, confidence: float) -> float:
    """Return the power by the normal approximation. square: mean square of a pair's difference.

    Without a difference the mean has the variance square / pairs, with one (square - difference**2) / pairs.
    """
    normal = NormalDist()
    limit, spread = normal.inv_cdf(0.5 + confidence / 2) * math.sqrt(square), math.sqrt(max(square - difference**2, 0))
    shift = difference * math.sqrt(num_pairs)
    if spread < _TIE * math.sqrt(square):
        return float(shift >= limit)
    return normal.cdf((shift - limit) / spread) + normal.cdf((-shift - limit) / spread)


def _examples_needed(difference: float, square: float, confidence: float) -> int:
    """Return the pairs with which `_normal_power` is 0.8, at least those that can be significant at all."""
    normal = NormalDist()
    limit = normal.inv_cdf(0.5 + confidence / 2) * math.sqrt(square)
    spread = normal.inv_cdf(_POWER) * math.sqrt(max(square - difference**2, 0))
    return max(fewest_pairs(confidence), math.ceil(((limit + spread) / difference) ** 2))
