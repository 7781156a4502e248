"""Quantiles of ratios from histograms, against the ratios themselves."""

import math

import numpy as np
import pytest
import torch

from ludic.training.step import log_ratio_histogram, ratio_quantile


def histogram(log_ratios: list[float], mask: list[bool] | None = None) -> torch.Tensor:
    return log_ratio_histogram(torch.tensor(log_ratios), torch.tensor(mask or [True] * len(log_ratios)))


def test_a_quantile_is_that_of_the_nearest_rank():
    # of 4 ratios, ranks up to 1, 2, 3 and 4 quarters: 1/2, 1, 1, 4
    found = histogram([math.log(4), 0.0, -math.log(2), 0.0])
    assert [ratio_quantile(found, q) for q in (0.01, 0.25, 0.5, 0.75, 0.99)] == pytest.approx(
        [0.5, 0.5, 1, 1, 4], rel=0.01
    )
    assert ratio_quantile(found, 0.5) == 1


def test_masked_tokens_do_not_count_not_even_those_that_are_no_number():
    found = histogram([float("nan"), 0.5, -float("inf")], [False, True, False])
    assert (found.sum(), ratio_quantile(found, 0.5)) == (1, pytest.approx(math.exp(0.5), rel=0.006))


def test_no_token_has_no_quantile():
    assert math.isnan(ratio_quantile(histogram([1.0], [False]), 0.5))


@pytest.mark.parametrize("log_ratio", [0.0, 1e-5, -1e-4, 0.003, -0.05, 0.3, -2.0, 19.0, 25.0])
def test_a_quantile_is_near_the_log_ratio_at_every_size(log_ratio: float):
    found = math.log(ratio_quantile(histogram([log_ratio]), 0.5))
    assert found == pytest.approx(max(-20, min(20, log_ratio)), rel=0.006, abs=6e-6)


def test_histograms_of_parts_add_up_to_that_of_the_whole():
    log_ratios = np.random.default_rng(0).normal(0, 0.2, 1000).astype(np.float32)
    parts = sum(histogram(part.tolist()) for part in np.split(log_ratios, [300, 301]))
    assert torch.equal(parts, histogram(log_ratios.tolist()))
    for q in (0.01, 0.99):
        wanted = np.quantile(log_ratios, q, method="inverted_cdf")
        assert math.log(ratio_quantile(parts, q)) == pytest.approx(wanted, rel=0.006)
