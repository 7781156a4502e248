"""Confidence intervals of a mean over examples, each with one or several values.

korn_graubard is for shares, clustered for other means; bootstrap and wilson are alternatives.

Values of one example depend on each other, so the example is the unit (Miller 2024, arXiv 2411.00640). Only NumPy.
Where examples do not differ, their spread says nothing about others, and only shares have an interval.
"""

# Shapes: G = examples (clusters). totals: (G,) float64, sum of an example's values; counts: (G,) its number of values.

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

_NUM_RESAMPLES = 2000
_RESAMPLES_AT_ONCE = 200
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


def korn_graubard(
    totals: np.ndarray, counts: np.ndarray, confidence: float = 0.95, *, num_trials: float | None = None
) -> Interval:
    """Return a share, with the interval of Korn and Graubard: Clopper-Pearson on the effective number of trials.

    For values between 0 and 1 (Korn and Graubard 1998, "Confidence intervals for proportions with small expected number
    of positive counts estimated from survey data", Survey Methodology 24, 193-201). The effective number of trials is
    share (1 - share) / error**2, times (z / t)**2 for an error that is estimated from few examples, at most num_trials
    (None: as many as values). They leave open what to do with few examples; here, by benchmarks/intervals.py:

    - error: of the jackknife that leaves out one example at a time; of equal counts it is the clustered error.
    - t has as many degrees of freedom as the spread of the examples allows: 2 G / (kurtosis - (G - 3) / (G - 1)), from
      1 to G - 1 (Satterthwaite 1946 with the variance of a variance; O'Neill 2014, "Some useful moment results in
      sampling problems", The American Statistician 68). If one example of ten has all successes, they are 2, not 9.
    - z, the normal quantile, stands for t with num_trials - 1 degrees of freedom, which is hardly larger.
    - The effective number is at least the number of examples, since no values between 0 and 1 spread more than those
      that are 0 or 1; of unequal counts at least Kish's number, sum(counts)**2 / sum(counts**2). It is this number if
      examples do not differ. With one value an example the interval is Clopper and Pearson's.

    The error is None where examples do not differ.
    """
    mean = _mean(totals, counts)
    if mean is None:
        return Interval(estimate=None)
    num_values = float(counts.sum())
    fewest, error = num_values**2 / float(np.sum(counts.astype(float) ** 2)), None
    num = fewest
    if _differ(totals, counts):
        size = len(totals)
        # mean minus the mean of the other examples, times (size - 1): of equal counts the deviation of an example
        parts = (totals - counts * mean) / (num_values - counts) * (size - 1)
        error = math.sqrt(float(np.sum(parts**2)) / (size * (size - 1)))
        kurtosis = size * float(np.sum(parts**4)) / float(np.sum(parts**2)) ** 2
        excess = kurtosis - (size - 3) / (size - 1)  # 2 for normal values
        df = size - 1.0 if excess <= 0 else min(max(1.0, 2 * size / excess), size - 1.0)
        shrunk = (NormalDist().inv_cdf(0.5 + confidence / 2) / t_quantile(0.5 + confidence / 2, df)) ** 2
        most = num_values if num_trials is None else num_trials
        num = max(fewest, min(most, mean * (1 - mean) / error**2 * shrunk))
    successes, tail = mean * num, (1 - confidence) / 2
    low = beta_quantile(tail, successes, num - successes + 1) if mean > 0 else 0.0
    high = 1 - beta_quantile(tail, num - successes, successes + 1) if mean < 1 else 1.0
    return Interval(estimate=mean, std_error=error, low=low, high=high)


def clustered(totals: np.ndarray, counts: np.ndarray, confidence: float = 0.95) -> Interval:
    """Return the mean of all values, with an interval by the clustered standard error and Student's t.

    The error is that of a regression on a constant with clusters, times sqrt(G / (G - 1)) for few examples; with one
    value an example it is the sample standard deviation over sqrt(G).
    """
    mean = _mean(totals, counts)
    if mean is None or not _differ(totals, counts):
        return Interval(estimate=mean)
    error = _std_error(totals, counts, mean) * math.sqrt(len(totals) / (len(totals) - 1))
    margin = t_quantile(0.5 + confidence / 2, len(totals) - 1) * error
    return Interval(estimate=mean, std_error=error, low=mean - margin, high=mean + margin)


def bootstrap(totals: np.ndarray, counts: np.ndarray, confidence: float = 0.95, *, seed: int = 0) -> Interval:
    """Return the mean of all values, with the percentiles of its bootstrap distribution; examples are resampled."""
    mean = _mean(totals, counts)
    if mean is None or not _differ(totals, counts):
        return Interval(estimate=mean)
    random, size = np.random.default_rng(seed), len(totals)
    means = []
    for _ in range(_NUM_RESAMPLES // _RESAMPLES_AT_ONCE):  # in parts, so that memory stays small
        times = random.multinomial(size, np.full(size, 1 / size), size=_RESAMPLES_AT_ONCE)
        means.append((times @ totals) / (times @ counts))
    found = np.concatenate(means)
    low, high = np.quantile(found, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(estimate=mean, std_error=float(found.std(ddof=1)), low=float(low), high=float(high))


def wilson(totals: np.ndarray, counts: np.ndarray, confidence: float = 0.95) -> Interval:
    """Return a share, with Wilson's interval. The values must lie between 0 and 1.

    With several values an example, the number of values is replaced by that of as many independent ones: the number
    with which a share would have the clustered standard error; at a share of 0 or 1 the number of examples.
    """
    mean = _mean(totals, counts)
    if mean is None:
        return Interval(estimate=None)
    variance, error = mean * (1 - mean), _std_error(totals, counts, mean)
    num = variance / error**2 if error > 0 and variance > 0 else float(len(totals))
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (mean + z**2 / (2 * num)) / (1 + z**2 / num)
    margin = z / (1 + z**2 / num) * math.sqrt(variance / num + z**2 / (4 * num**2))
    low, high = max(0.0, centre - margin), min(1.0, centre + margin)
    return Interval(estimate=mean, std_error=error if _differ(totals, counts) else None, low=low, high=high)


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


def _differ(totals: np.ndarray, counts: np.ndarray) -> bool:
    """Return whether examples differ in their means, so that their spread can be estimated."""
    means = totals / counts
    return len(means) > 1 and float(np.ptp(means)) > _EQUAL * float(np.max(np.abs(means)))


def _mean(totals: np.ndarray, counts: np.ndarray) -> float | None:
    return float(totals.sum() / counts.sum()) if counts.sum() else None


def _std_error(totals: np.ndarray, counts: np.ndarray, mean: float) -> float:
    """Return the clustered standard error, without the correction for few examples."""
    return float(np.sqrt(np.sum((totals - counts * mean) ** 2)) / counts.sum())
