"""Confidence intervals of a mean over examples, each with one or several values: clustered, bootstrap, Wilson.

Values of one example depend on each other, so the example is the unit (Miller 2024, arXiv 2411.00640). Only NumPy.
"""

# Shapes: G = examples (clusters). totals: (G,) float64, sum of an example's values; counts: (G,) its number of values.

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np

Method = Literal["clustered", "bootstrap", "wilson"]

_NUM_RESAMPLES = 2000
_RESAMPLES_AT_ONCE = 200
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its confidence interval. None: too few examples to tell."""

    estimate: float | None
    std_error: float | None
    low: float | None
    high: float | None


def clustered(totals: np.ndarray, counts: np.ndarray, confidence: float = 0.95) -> Interval:
    """Return the mean of all values, with an interval by the clustered standard error and Student's t.

    The error is that of a regression on a constant with clusters, times sqrt(G / (G - 1)) for few examples; with one
    value an example it is the sample standard deviation over sqrt(G).
    """
    mean = _mean(totals, counts)
    if mean is None or len(totals) < 2:
        return Interval(estimate=mean, std_error=None, low=None, high=None)
    error = _std_error(totals, counts, mean) * math.sqrt(len(totals) / (len(totals) - 1))
    margin = t_quantile(0.5 + confidence / 2, len(totals) - 1) * error
    return Interval(estimate=mean, std_error=error, low=mean - margin, high=mean + margin)


def bootstrap(totals: np.ndarray, counts: np.ndarray, confidence: float = 0.95, *, seed: int = 0) -> Interval:
    """Return the mean of all values, with the percentiles of its bootstrap distribution; examples are resampled."""
    mean = _mean(totals, counts)
    if mean is None or len(totals) < 2:
        return Interval(estimate=mean, std_error=None, low=None, high=None)
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
        return Interval(estimate=None, std_error=None, low=None, high=None)
    variance, error = mean * (1 - mean), _std_error(totals, counts, mean)
    num = variance / error**2 if error > 0 and variance > 0 else float(len(totals))
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (mean + z**2 / (2 * num)) / (1 + z**2 / num)
    margin = z / (1 + z**2 / num) * math.sqrt(variance / num + z**2 / (4 * num**2))
    return Interval(estimate=mean, std_error=error, low=max(0.0, centre - margin), high=min(1.0, centre + margin))


@lru_cache(maxsize=256)
def t_quantile(probability: float, df: int) -> float:
    """Return the quantile of Student's t distribution, for probabilities from 0.5 to 1."""
    low, high = 0.0, 1.0
    while _t_share(high, df) < 2 * probability - 1:
        high *= 2
    for _ in range(80):  # bisection: each halves the error
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, df) < 2 * probability - 1 else (low, middle)
    return (low + high) / 2


def _t_share(t: float, df: int) -> float:
    """Return the probability that |T| <= t: the density, with x = sqrt(df) tan(angle), is smooth in the angle."""
    end = math.atan(t / math.sqrt(df))
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    angles = end / 2 * (_NODES + 1)
    return 2 * scale * end / 2 * float(_WEIGHTS @ np.cos(angles) ** (df - 1))


def _mean(totals: np.ndarray, counts: np.ndarray) -> float | None:
    return float(totals.sum() / counts.sum()) if counts.sum() else None


def _std_error(totals: np.ndarray, counts: np.ndarray, mean: float) -> float:
    """Return the clustered standard error, without the correction for few examples."""
    return float(np.sqrt(np.sum((totals - counts * mean) ** 2)) / counts.sum())
