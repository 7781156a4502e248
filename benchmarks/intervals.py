"""Simulate how often intervals of shares hold the truth, and whether comparisons say which power they have.

    python -m benchmarks.intervals

An example has a chance of success of its own, drawn from a beta distribution, and one or several samples. The truth is
the distribution's mean. Coverage: the share of drawn evaluations whose 95% interval holds it. Clustered intervals
without a width, which are not reported, count as such. Wilson with t has the t quantile of G - 1 degrees of freedom,
the clustered standard error, and the number of examples where that is 0.

Power: both sides answer the same examples, with chances that differ by `difference`. True power is the share of drawn
comparisons with p <= 0.05, by the test that `ludic eval compare` uses. Reported power is that which it prints.
"""

# Shapes: R = drawn evaluations, G = examples. totals: (R, G) successes of each example.

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist

import numpy as np

from benchmarks.measure import print_table
from ludic.eval import statistics
from ludic.flags import run_script

DISTRIBUTIONS: Mapping[str, tuple[float, float]] = {
    "uniform, Beta(1, 1)": (1, 1),
    "U-shaped, Beta(.3, .3)": (0.3, 0.3),
    "middle, Beta(5, 5)": (5, 5),
    "low, Beta(.2, 3.8)": (0.2, 3.8),
    "high, Beta(9.5, .5)": (9.5, 0.5),
    "extreme, Beta(.1, 9.9)": (0.1, 9.9),
}
NUM_EXAMPLES = (5, 10, 20, 50)
NUM_SAMPLES = (1, 4, 16)
CHANGES = ((0.35, 0.3), (0.02, 0.05), (0.0, 0.3))
"""Chance of the baseline, and the difference to the other side."""

Bounds = tuple[float, float]
Method = Callable[[np.ndarray, np.ndarray], Bounds]


def main(quick: bool = False, draws: int = 4000) -> None:
    """Print tables.

    Args:
        quick: Use few draws, to check that the benchmark works.
        draws: Number of evaluations drawn of each cell; of comparisons a tenth.
    """
    draws = 20 if quick else draws
    print_coverage(draws)
    print_power(max(10, draws // 10))


def print_coverage(draws: int) -> None:
    rows, widths = [], []
    for name, (a, b) in DISTRIBUTIONS.items():
        for num_examples in NUM_EXAMPLES:
            for num_samples in NUM_SAMPLES:
                measured = cell(a, b, num_examples, num_samples, draws)
                shown = (f"{each:.3f}" for each in (*measured["coverage"], *measured["width"]))
                rows.append([name, str(num_examples), str(num_samples), *shown])
                widths.append(measured)
    coverages = [f"{min(each['coverage'][place] for each in widths):.3f}" for place in range(3)]
    mean_widths = [f"{np.mean([each['width'][place] for each in widths]):.3f}" for place in range(3)]
    rows.append(["lowest coverage, mean width", "", "", *coverages, *mean_widths])
    titles = [f"{what}: {name}" for what in ("coverage", "width") for name in METHODS]
    print_table(f"95% intervals of shares, {draws:,} draws", ["chances", "examples", "samples", *titles], rows)


def cell(a: float, b: float, num_examples: int, num_samples: int, draws: int, seed: int = 0) -> dict[str, list[float]]:
    """Return the coverage and the mean width of each of METHODS, for chances drawn from Beta(a, b)."""
    random = np.random.default_rng([seed, num_examples, num_samples, int(100 * a), int(100 * b)])
    totals = random.binomial(num_samples, random.beta(a, b, size=(draws, num_examples)))
    # The order of examples changes nothing, and many evaluations are equal up to it.
    distinct, times = np.unique(np.sort(totals, axis=1), axis=0, return_counts=True)
    counts, truth = np.full(num_examples, num_samples), a / (a + b)
    found: dict[str, list[float]] = {"coverage": [], "width": []}
    for method in METHODS.values():
        bounds = np.array([method(row.astype(float), counts) for row in distinct])
        held = (bounds[:, 0] <= truth) & (truth <= bounds[:, 1])
        found["coverage"].append(float(times @ held / draws))
        found["width"].append(float(times @ (bounds[:, 1] - bounds[:, 0]) / draws))
    return found


def _korn_graubard(totals: np.ndarray, counts: np.ndarray) -> Bounds:
    return _bounds(statistics.korn_graubard(totals, counts))


def _clustered(totals: np.ndarray, counts: np.ndarray) -> Bounds:
    found = statistics.clustered(totals, counts)
    mean = found.estimate or 0.0
    return (mean, mean) if found.low is None else _bounds(found)


def _wilson_t(totals: np.ndarray, counts: np.ndarray) -> Bounds:
    found = statistics.clustered(totals, counts)
    mean, error, size = found.estimate or 0.0, found.std_error, len(totals)
    num = mean * (1 - mean) / error**2 if error else size
    t = statistics.t_quantile(0.975, size - 1)
    centre = (mean + t**2 / (2 * num)) / (1 + t**2 / num)
    margin = t / (1 + t**2 / num) * math.sqrt(mean * (1 - mean) / num + t**2 / (4 * num**2))
    return max(0.0, centre - margin), min(1.0, centre + margin)


METHODS: Mapping[str, Method] = {
    "Korn-Graubard": _korn_graubard,
    "Wilson with t": _wilson_t,
    "clustered": _clustered,
}


def _bounds(found: statistics.Interval) -> Bounds:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def print_power(draws: int) -> None:
    rows = []
    for num_samples in (1, 4):
        for num_pairs in NUM_EXAMPLES:
            for start, change in CHANGES:
                found = np.array(list(comparisons(num_samples, num_pairs, start, change, draws)), dtype=float)
                true, reported, old, coverage = np.nanmean(found[:, :4], axis=0)
                missing = np.mean(np.isnan(found[:, 1]))
                figures = (f"{each:.2f}" for each in (true, reported, old, reported - true, missing))
                cells = map(str, (num_samples, num_pairs, start, change))
                rows.append([*cells, *figures, f"{coverage:.3f}"])
    titles = ["true power", "reported", "by the normal approximation", "excess", "not estimated", "coverage"]
    sizes = ["samples", "pairs", "baseline", "difference"]
    print_table(f"Comparisons, {draws:,} draws", [*sizes, *titles], rows)


def comparisons(
    num_samples: int, num_pairs: int, start: float, change: float, draws: int, seed: int = 0
) -> Iterator[tuple[float, float, float, float]]:
    """Yield for each drawn comparison: is it significant, power, power by the normal approximation, truth in interval.

    NaN: it cannot be estimated.
    """
    random = np.random.default_rng([seed, num_samples, num_pairs, int(100 * start), int(100 * change)])
    a, b = (random.binomial(num_samples, each, size=(draws, num_pairs)) for each in (start, start + change))
    is_binary = num_samples == 1
    for row in (b - a) / num_samples:
        gains, losses = int(np.sum(row > 0)), int(np.sum(row < 0))
        p_value = statistics.mcnemar(gains, losses) if is_binary else statistics.permutation(row)
        power = statistics.power(row, change, is_binary=is_binary).power
        interval = statistics.clustered(row, np.ones(num_pairs))
        error = interval.std_error
        if error is None:
            interval = statistics.equal_differences(float(row.mean()), num_pairs)
        low, high = _bounds(interval)
        yield (
            p_value <= 0.05,
            math.nan if power is None else power,
            1.0 if error is None else _normal_power(change / error),
            low <= change <= high,
        )


def _normal_power(shift: float) -> float:
    normal = NormalDist()
    limit = normal.inv_cdf(0.975)
    return normal.cdf(shift - limit) + normal.cdf(-shift - limit)


if __name__ == "__main__":
    run_script(main, description=__doc__)
