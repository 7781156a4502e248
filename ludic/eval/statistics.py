"""Compute confidence intervals of a mean over examples, and test a difference between two policies, with NumPy only."""

# Shapes: G = examples. means: (G,) float64, mean of an example's values; examples count alike, however many values they
# have. differences: (G,) float64, of examples that both sides have, mean of B's values minus mean of A's.

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

# --- Intervals -----------------------------------------------------------------------------------------
# korn_graubard is for shares, clustered for all means.
#
# Values of one example depend on each other, so the example is the unit (Miller 2024, arXiv 2411.00640), and what is
# estimated is the mean over all examples of an example's mean. Where examples do not differ, or are fewer than
# FEWEST_EXAMPLES, their spread says nothing about others, and only shares have an interval.

ESTIMAND = "mean over examples, each with the mean of its values"
"""Quantity that all figures of evaluations and comparisons estimate."""

FEWEST_EXAMPLES = 5
"""Examples from which an interval is computed by their spread. If half of all examples are hard and half are easy, 4
are of one kind in 1 of 8 draws, and 5 in 1 of 16."""
_EQUAL = 1e-12
"""Relative spread of examples up to which they do not differ: sums of equal values are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its confidence interval. None: it cannot be estimated."""

    estimate: float | None
    std_error: float | None = None
    low: float | None = None
    high: float | None = None

    def within(self, lowest: float, highest: float) -> "Interval":
        """Return the interval without the values that the mean can't have."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(lowest, self.low), high=min(highest, self.high))


def korn_graubard(means: np.ndarray, confidence: float = 0.95, *, trials: np.ndarray | None = None) -> Interval:
    """Return a share, with the interval of Korn and Graubard: Clopper-Pearson on the effective number of trials.

    For means between 0 and 1 (Korn and Graubard 1998, "Confidence intervals for proportions with small expected number
    of positive counts estimated from survey data", Survey Methodology 24, 193-201). trials: (G,) independent trials
    behind each mean; None: one each. The effective number of trials is share (1 - share) / error**2, times (z / t)**2
    for an error that is estimated from few examples. The paper does not treat few examples; here, by
    benchmarks/intervals.py:

    - error: the standard error of the mean of the examples' means.
    - t has as many degrees of freedom as the spread of the examples allows: 2 G / (kurtosis - (G - 3) / (G - 1)), from
      1 to G - 1 (Satterthwaite 1946 with the variance of a variance; O'Neill 2014, "Some useful moment results in
      sampling problems", The American Statistician 68). If one example of ten has all successes, they are 2, not 9.
    - z, the normal quantile, approximates t with the trials' degrees of freedom, which is hardly larger.
    - The effective number is at least the number of examples, since no values between 0 and 1 spread more than those
      that are 0 or 1. It is this number if examples do not differ. With one value an example the interval is Clopper
      and Pearson's.
    - It is at most G**2 / sum(1 / trials), which would be right if all examples had one chance, and at most G**2 / 4: a
      few examples may all be of one kind, and their spread then does not represent the others.

    The error is None where examples do not differ.
    """
    if not len(means):
        return Interval(estimate=None)
    mean, size = float(means.mean()), len(means)
    num, error = float(size), None
    if _differ(means):
        parts = means - mean
        error = math.sqrt(float(np.sum(parts**2)) / (size * (size - 1)))
        kurtosis = size * float(np.sum(parts**4)) / float(np.sum(parts**2)) ** 2
        excess = kurtosis - (size - 3) / (size - 1)  # 2 for normal values
        df = size - 1.0 if excess <= 0 else min(max(1.0, 2 * size / excess), size - 1.0)
        shrunk = (NormalDist().inv_cdf(0.5 + confidence / 2) / t_quantile(0.5 + confidence / 2, df)) ** 2
        most = min(size if trials is None else size**2 / float(np.sum(1 / trials)), size**2 / 4)
        num = max(size, min(most, mean * (1 - mean) / error**2 * shrunk))
    successes, tail = mean * num, (1 - confidence) / 2
    low = beta_quantile(tail, successes, num - successes + 1) if mean > 0 else 0.0
    high = 1 - beta_quantile(tail, num - successes, successes + 1) if mean < 1 else 1.0
    return Interval(estimate=mean, std_error=error, low=low, high=high)


def clustered(means: np.ndarray, confidence: float = 0.95, *, fewest: int = FEWEST_EXAMPLES) -> Interval:
    """Return the mean over examples, with an interval by the standard error of their means and Student's t.

    fewest: examples from which there is an interval, at least 2.
    """
    if not len(means):
        return Interval(estimate=None)
    mean, size = float(means.mean()), len(means)
    if not _differ(means) or size < max(2, fewest):
        return Interval(estimate=mean)
    error = float(means.std(ddof=1)) / math.sqrt(size)
    margin = t_quantile(0.5 + confidence / 2, size - 1) * error
    return Interval(estimate=mean, std_error=error, low=mean - margin, high=mean + margin)


def welch(first: np.ndarray, other: np.ndarray, confidence: float = 0.95, *, fewest: int = FEWEST_EXAMPLES) -> Interval:
    """Return the difference of two means, other minus first, of values that are not paired.

    The interval is Welch's (1947, "The generalization of 'Student's' problem when several different population
    variances are involved", Biometrika 34, 28-35): the two sides may differ in number and in spread. There is none if
    a side has fewer values than `fewest`, or if neither side's values differ.
    """
    if not len(first) or not len(other):
        return Interval(estimate=None)
    difference = float(other.mean() - first.mean())
    if min(len(first), len(other)) < max(2, fewest) or not (_differ(first) or _differ(other)):
        return Interval(estimate=difference)
    squares = [float(each.var(ddof=1)) / len(each) for each in (first, other)]
    df = sum(squares) ** 2 / sum(
        square**2 / (len(each) - 1) for square, each in zip(squares, (first, other), strict=True)
    )
    error = math.sqrt(sum(squares))
    margin = t_quantile(0.5 + confidence / 2, df) * error
    return Interval(estimate=difference, std_error=error, low=difference - margin, high=difference + margin)


def equal_differences(difference: float, num_examples: int, confidence: float = 0.95) -> Interval:
    """Return the interval of a mean difference between shares, of examples that all have the same difference.

    An example of another difference was not drawn, so a share of at most 1 - (1 - confidence)**(1 / G) of all examples
    has one (Clopper and Pearson 1934, one-sided; about 3 / G, Hanley and Lippman-Hand 1983), between -1 and 1.
    """
    others = 1 - (1 - confidence) ** (1 / num_examples)
    low, high = (difference * (1 - others) + end * others for end in (-1, 1))
    return Interval(estimate=difference, low=low, high=high)


@lru_cache(maxsize=4096)
def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t distribution, for probabilities from 0.5 to 1; df may be a fraction.

    t**2 / (df + t**2) has a beta distribution (Abramowitz and Stegun 1964, 26.7.1).
    """
    share = beta_quantile(2 * probability - 1, 0.5, df / 2)
    return math.sqrt(df * share / (1 - share))


@lru_cache(maxsize=4096)
def beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the quantile of the beta distribution, by Newton's method inside of a bracket that is halved at least."""
    low, high = 0.0, 1.0
    x, constant = a / (a + b), math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    for _ in range(200):
        excess = beta_share(x, a, b) - probability
        low, high = (low, x) if excess > 0 else (x, high)
        density = math.exp(constant + (a - 1) * math.log(x) + (b - 1) * math.log1p(-x))
        step = excess / density if density > 0 else math.inf
        next_x = x - step if low < x - step < high else (low + high) / 2
        if abs(next_x - x) <= 1e-14 * x:
            return next_x
        x = next_x
    return x


def beta_share(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function, for 0 < x < 1: the continued fraction of DLMF 8.17.22."""
    if x > (a + 1) / (a + b + 2):  # the other end converges faster
        return 1 - beta_share(1 - x, b, a)
    scale = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    value, c, d = 1.0, 1.0, 0.0  # Lentz's method, as modified by Thompson and Barnett (1986)
    for step in range(100_000):
        m = step // 2
        if step == 0:
            numerator = 1.0
        elif step % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _not_zero(1 + numerator * d)
        c = _not_zero(1 + numerator / c)
        value *= c * d
        if step and abs(c * d - 1) < 1e-15:
            break
    return scale * (value - 1)


def _not_zero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


def _differ(means: np.ndarray) -> bool:
    """Return whether examples differ in their means, so that their spread can be estimated."""
    return len(means) > 1 and float(np.ptp(means)) > _EQUAL * float(np.max(np.abs(means)))


# --- Tests of a difference on the same examples, their power, and Holm's correction --------------------
# Power is that of the test in use: McNemar's exact test, or the permutation test.

EXACT_UP_TO = 16
"""Differences that are not 0, up to which all signs are tried: 65,536 ways."""
_NUM_FLIPS = 10_000
_FLIPS_AT_ONCE = 500
_TIE = 1e-9
"""Relative difference of sums that count as equal; they are added in different orders."""
_POWER = 0.8
_MOST_PAIRS = 256
"""Maximum pairs for which the power of the test itself is computed; beyond, its normal approximation."""
FEWEST_FOR_POWER = 20
"""Pairs from which power is estimated. Of 6, a power of 0.14 came out as 0.31 on average (benchmarks/intervals.py)."""
_NUM_POWER_FLIPS = 2_000
_NUM_DRAWS = 400
"""Drawn comparisons of the permutation test's power: its error is at most 0.025."""


def mcnemar(num_gains: int, num_losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: each changed example is a gain with probability 1/2."""
    num = num_gains + num_losses
    tail, ways = 0, 1
    for count in range(min(num_gains, num_losses) + 1):
        tail += ways
        ways = ways * (num - count) // (count + 1)  # C(num, count + 1)
    return min(1.0, (2 * tail) / (1 << num))  # Python divides integers of any size exactly, then rounds


def mcnemar_mid_p(num_gains: int, num_losses: int) -> float:
    """Return the two-sided mid-p-value of McNemar's test: half the probability of the observed counts is left out.

    The exact test is conservative; this one hardly ever exceeds its level (Fagerland, Lydersen, Laake 2013, "The
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
    """Power of a comparison. None: it can't be estimated."""

    power: float | None
    """Probability that the test in use detects a true difference."""
    examples_needed: int | None
    """Number of examples needed to detect it with a probability of 0.8."""


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

    Power is 0 for fewer than `fewest_pairs`, and not estimated for fewer than FEWEST_FOR_POWER: it is a steep function
    of the spread, which few pairs do not give. Neither figure can be estimated if no example differs by as much as the
    wanted difference, or if all differ alike.
    """
    size = len(differences)
    zero = 0.0 if size < fewest_pairs(confidence) else None
    wanted = abs(difference)
    values, chances = _tilted(differences, wanted)
    if chances is None:
        return Power(power=zero, examples_needed=None)
    square = float(chances @ values**2)
    needed = _examples_needed(wanted, square, confidence)
    if size < FEWEST_FOR_POWER:
        return Power(power=zero, examples_needed=needed if zero is None else max(needed, size + 1))
    if size > _MOST_PAIRS:
        found = _normal_power(size, wanted, square, confidence)
    elif is_binary:
        gain, loss = (float(chances[values == sign].sum()) for sign in (1, -1))
        found = _mcnemar_power(size, gain, loss, 1 - confidence)
    else:
        found = _permutation_power(size, values, chances, 1 - confidence, seed)
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
    signs = 1 - 2 * random.integers(0, 2, size=(_NUM_POWER_FLIPS, num_pairs))
    limits = np.abs(drawn.sum(0)) - _TIE * np.abs(drawn).sum(0)
    num_extreme = np.sum(np.abs(signs.astype(float) @ drawn) >= limits, axis=0)
    p_values = (num_extreme + 1) / (len(signs) + 1)
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
