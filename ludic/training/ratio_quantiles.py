"""Quantiles of importance ratios from histograms of log ratios, which add up over micro-batches and ranks. Pure.

The bins are equal steps of asinh(log ratio / 0.001): a quantile is within 0.6% of its log ratio, or 1e-5 near 0. So a
ratio of 1.0001 is told from 1, and one of e^20 still has a bin.
"""

# Shapes: A = response tokens of a micro-batch, B = bins.

from math import asinh, exp, nan, sinh

import torch
from torch import Tensor

from ludic.training.losses.ratios import MAX_LOG_RATIO, bounded

_SCALE = 1e-3
"""Nats below which bins are of about equal width."""
_HALF = 1024
"""Bins on either side of the middle one, which holds the ratio 1."""
_STEP = asinh(MAX_LOG_RATIO / _SCALE) / _HALF


def log_ratio_histogram(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return (B,) int64: number of tokens in each bin. log_ratio: (A,) nats, trainer minus sampler; mask: (A,) bool."""
    positions = (bounded(torch.where(mask, log_ratio, 0)) / _SCALE).asinh() / _STEP
    bins = positions.round().long() + _HALF
    return torch.zeros(2 * _HALF + 1, dtype=torch.int64, device=bins.device).index_add_(0, bins, mask.long())


def ratio_quantile(histogram: Tensor, q: float) -> float:
    """Return the q-quantile of the ratios of a histogram, by nearest rank; NaN if it is empty."""
    cumulative = histogram.cumsum(0)
    if cumulative[-1] == 0:
        return nan
    index = int((cumulative < q * cumulative[-1]).sum())
    return exp(_SCALE * sinh((index - _HALF) * _STEP))
