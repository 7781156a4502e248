"""Simulate how often intervals of shares hold the truth, and whether comparisons say which power they have.

    python -m benchmarks.intervals

An example has a chance of success of its own, drawn from a distribution, and one or several samples. The truth is the
distribution's mean. Coverage: the share of drawn evaluations whose 95% interval holds it. Clustered intervals without a
width, and those of fewer than 5 examples, are not reported; here they count as the mean alone. Wilson with t has the t
quantile of G - 1 degrees of freedom, the standard error of the examples' means, and the number of examples where that
is 0.

Power: both sides answer the same examples, with chances that differ by `difference`. True power is the share of drawn
comparisons with p <= 0.05, by the test that `ludic compare` uses. Reported power is that which it prints.

Best of many: versions that are equally good answer the same examples, and the one with the highest share is reported.
"""

# Shapes: R = drawn evaluations, G = examples. means: (R, G) mean of each example's samples.

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist

import numpy as np

from benchmarks.measure import print_table
from ludic.eval import statistics
from ludic.settings import run_script

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _beta(a: float, b: float) -> tuple[Draw, float]:
    return lambda random, shape: random.beta(a, b, size=shape), a / (a + b)


def _two_kinds(share: float) -> tuple[Draw, float]:
    """Chances of 0.9 for a share of the examples, and of 0.1 for the others."""
    return lambda random, shape: np.where(random.random(shape) < share, 0.9, 0.1), 0.1 + 0.8 * share


DISTRIBUTIONS: Mapping[str, tuple[Draw, float]] = {
    "all 0.5": (lambda random, shape: np.full(shape, 0.5), 0.5),
    "uniform, Beta(1, 1)": _beta(1, 1),
    "U-shaped, Beta(.3, .3)": _beta(0.3, 0.3),
    "middle, Beta(5, 5)": _beta(5, 5),
    "low, Beta(.2, 3.8)": _beta(0.2, 3.8),
    "high, Beta(9.5, .5)": _beta(9.5, 0.5),
    "extreme, Beta(.1, 9.9)": _beta(0.1, 9.9),
    "0.1 or 0.9, half each": _two_kinds(0.5),
    "0.1, a fifth 0.9": _two_kinds(0.2),
}
"""How chances are drawn, and their mean."""
NUM_EXAMPLES = (3, 5, 8, 10, 20, 50)
SAMPLES: Mapping[str, tuple[int, ...]] = {"1": (1,), "4": (4,), "16": (16,), "half 1, half 16": (1, 16)}
"""Samples of the first, the second, ... example; then from the start again."""
NUM_PAIRS = (5, 6, 10, 20, 50)
NUM_VERSIONS = (2, 5, 10, 20)
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
    draws = 4 if quick else draws
    print_coverage(draws)
    print_power(max(2, draws // 10))
    print_best(draws)


def print_coverage(draws: int) -> None:
    rows, widths = [], []
    for name in DISTRIBUTIONS:
        for num_examples in NUM_EXAMPLES:
            for samples in SAMPLES:
                measured = cell(name, num_examples, samples, draws)
                shown = (f"{each:.3f}" for each in (*measured["coverage"], *measured["width"]))
                rows.append([name, str(num_examples), samples, *shown])
                widths.append(measured)
    coverages = [f"{min(each['coverage'][place] for each in widths):.3f}" for place in range(3)]
    mean_widths = [f"{np.mean([each['width'][place] for each in widths]):.3f}" for place in range(3)]
    rows.append(["lowest coverage, mean width", "", "", *coverages, *mean_widths])
    titles = [f"{what}: {name}" for what in ("coverage", "width") for name in METHODS]
    print_table(f"95% intervals of shares, {draws:,} draws", ["chances", "examples", "samples", *titles], rows)


def cell(name: str, num_examples: int, samples: str, draws: int, seed: int = 0) -> dict[str, list[float]]:
    """Return the coverage and the mean width of each of METHODS. name, samples: of DISTRIBUTIONS and SAMPLES."""
    random = np.random.default_rng([seed, num_examples, list(SAMPLES).index(samples), list(DISTRIBUTIONS).index(name)])
    (draw, truth), counts = DISTRIBUTIONS[name], np.resize(SAMPLES[samples], num_examples)
    means = random.binomial(counts, draw(random, (draws, num_examples))) / counts
    # The order of examples with equal counts changes nothing, and many evaluations are equal up to it.
    means = np.concatenate([np.sort(means[:, counts == count], axis=1) for count in np.unique(counts)], axis=1)
    distinct, times = np.unique(means, axis=0, return_counts=True)
    found: dict[str, list[float]] = {"coverage": [], "width": []}
    for method in METHODS.values():
        bounds = np.array([method(row, np.sort(counts)) for row in distinct])
        held = (bounds[:, 0] <= truth) & (truth <= bounds[:, 1])
        found["coverage"].append(float(times @ held / draws))
        found["width"].append(float(times @ (bounds[:, 1] - bounds[:, 0]) / draws))
    return found


def _korn_graubard(means: np.ndarray, counts: np.ndarray) -> Bounds:
    return _bounds(statistics.korn_graubard(means, trials=counts))


def _clustered(means: np.ndarray, counts: np.ndarray) -> Bounds:
    found = statistics.clustered(means)
    mean = found.estimate or 0.0
    return (mean, mean) if found.low is None else _bounds(found)


def _wilson_t(means: np.ndarray, counts: np.ndarray) -> Bounds:
    mean, size = float(means.mean()), len(means)
    error = float(means.std(ddof=1)) / math.sqrt(size)
    num = mean * (1 - mean) / error**2 if error > 1e-9 else size
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
        for num_pairs in NUM_PAIRS:
            for start, change in CHANGES:
                found = np.array(list(comparisons(num_samples, num_pairs, start, change, draws)), dtype=float)
                true, reported, old, coverage = (
                    np.nanmean(column) if np.any(column >= 0) else math.nan for column in found.T
                )
                missing = np.mean(np.isnan(found[:, 1]))
                shown = (true, reported, old, reported - true, missing)
                figures = ("-" if math.isnan(each) else f"{each:.2f}" for each in shown)
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
        interval = statistics.clustered(row)
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


def print_best(draws: int) -> None:
    rows = []
    for num_versions in NUM_VERSIONS:
        excess, coverage = best_of(num_versions, 256, draws)
        rows.append([str(num_versions), f"{excess:+.3f}", f"{coverage:.3f}"])
    print_table(f"Best of equal versions, {draws:,} draws", ["versions", "excess of the best", "coverage"], rows)


def best_of(num_versions: int, num_examples: int, draws: int, seed: int = 0) -> tuple[float, float]:
    """Return by how much the best share is too high, and the coverage of its interval; one sample an example.

    All versions have the same chance at an example, drawn from Beta(1, 1).
    """
    random = np.random.default_rng([seed, num_versions, num_examples])
    best = []
    for _ in range(draws):
        chances = random.beta(1, 1, size=num_examples)
        best.append(int(random.binomial(1, chances, size=(num_versions, num_examples)).sum(1).max()))
    counts, times = np.unique(best, return_counts=True)
    shares = [np.repeat([1.0, 0.0], [count, num_examples - count]) for count in counts]
    held = [low <= 0.5 <= high for low, high in (_bounds(statistics.korn_graubard(share)) for share in shares)]
    return float(np.mean(best)) / num_examples - 0.5, float(times @ np.array(held, dtype=float) / draws)


def _normal_power(shift: float) -> float:
    normal = NormalDist()
    limit = normal.inv_cdf(0.975)
    return normal.cdf(shift - limit) + normal.cdf(-shift - limit)


if __name__ == "__main__":
    run_script(main, description=__doc__)
